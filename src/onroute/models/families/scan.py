"""Which model types of the installed transformers choose experts, read from its source.

A release that brings a family brings it here by itself: nothing is listed by hand. No modeling file is
imported.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from transformers import CONFIG_MAPPING
from transformers.models.auto import configuration_auto, modeling_auto

_EXPERTS: Final = re.compile(r"[eE]xperts?\b|_experts")
_CHOICE: Final = re.compile(r"\b(?:topk|argmax)\(")

_HEADS: Final = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)
"""Tables of transformers, model type -> class, whose classes give logits over a vocabulary."""


@cache
def routing_model_types() -> tuple[str, ...]:
    """Every model type with experts and a choice among them, sorted.

    Of a family with several types (a text model and its multimodal wrapper) those that have a
    language-model head; of a family without any, those that can be built at all.
    """
    return tuple(sorted(model_type for types in routing_families().values() for model_type in types))


@cache
def routing_families() -> dict[str, tuple[str, ...]]:
    """Family, the name of its folder in transformers -> its model types."""
    by_family: dict[str, list[str]] = {}
    for model_type in CONFIG_MAPPING:
        by_family.setdefault(configuration_auto.model_type_to_module_name(model_type), []).append(model_type)
    with_head = frozenset(model_type for table in _HEADS for model_type in getattr(modeling_auto, table, {}))
    families = {}
    for family in sorted(folder.name for folder in _folders() if _chooses_experts(folder)):
        types = by_family.get(family, [])
        built = [t for t in types if t in with_head] or [
            t for t in types if t in modeling_auto.MODEL_MAPPING_NAMES
        ]
        families[family] = tuple(built)
    return families


def _folders() -> list[Path]:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    return [folder for folder in (Path(spec.origin).parent / "models").iterdir() if folder.is_dir()]


def _chooses_experts(folder: Path) -> bool:
    sources = [file.read_text(encoding="utf-8") for file in folder.glob("modeling_*.py")]
    return any(_EXPERTS.search(source) and _CHOICE.search(source) for source in sources)
