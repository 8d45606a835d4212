"""The rollout engines by name."""

from __future__ import annotations

from onroute.core.config.catalog import Catalog, CatalogEntry

ENGINES: Catalog = {
    "huggingface": CatalogEntry(
        name="huggingface",
        target="onroute.engines.huggingface:HuggingFaceEngine",
        summary="stock transformers in the trainer's process, batched decoding with a KV cache",
        properties=frozenset({"returns_routes"}),
    )
}
