"""The trackers by name. Imports no tracker library."""

from __future__ import annotations

from onroute.core.config.catalog import CatalogEntry

TRACKERS: dict[str, CatalogEntry] = {
    "tensorboard": CatalogEntry(
        name="tensorboard",
        target="onroute.observability.trackers.tensorboard:TensorBoard",
        summary="Scalars in the run folder's tensorboard/, for `tensorboard --logdir`.",
    )
}
"""Constructed as `target(folder, resumed_from=…)`. metrics.jsonl is always written and is not named here."""
