"""Small catalogues for the tests of the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onroute.core.config.catalog import CatalogEntry, Catalogs
from onroute.core.samples import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class SortingOptions:
    task: str
    """Name of the task."""
    sizes: tuple[int, ...] = (3, 5)
    """Lengths of the lists."""
    limit: int | None = None
    """Most problems; none means all."""
    parameters: Mapping[str, Json] = field(default_factory=dict)
    """Anything the task takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    clip_low: float = 0.2
    """Lower bound of the ratio."""
    clip_high: float = 0.28
    """Upper bound of the ratio,
    over two lines."""

    def __post_init__(self) -> None:
        if self.clip_low < 0:
            raise ValueError(f"clip_low is {self.clip_low}, must be at least 0")


CATALOGS = Catalogs(
    engines={"huggingface": CatalogEntry(name="huggingface", target="a:B", summary="stock decoding")},
    environments={
        "sorting": CatalogEntry(name="sorting", target="a:B", summary="lists", options=SortingOptions)
    },
    advantages={
        "grpo": CatalogEntry(
            name="grpo", target="a:B", summary="group mean", properties=frozenset({"needs_groups"})
        ),
        "plain": CatalogEntry(name="plain", target="a:B", summary="the reward itself"),
    },
    losses={"clipped": CatalogEntry(name="clipped", target="a:B", summary="PPO", options=ClipOptions)},
    trackers={"tensorboard": CatalogEntry(name="tensorboard", target="a:B", summary="scalars")},
)

SMALLEST = """
[model]
path = "models/tiny"
[environment]
name = "sorting"
options.task = "number_sorting"
[run]
folder = "runs/a"
"""
