"""The environments by name. Imports no torch and no task library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onroute.core.config.catalog import CatalogEntry
from onroute.core.samples import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymOptions:
    task: str
    """Name of the reasoning-gym task, e.g. "number_sorting"; `onroute config --tasks` lists them."""
    parameters: Mapping[str, Json] = field(default_factory=dict)
    """Parameters of that task, e.g. {min_numbers = 3}; seed and size are set by the run. `onroute config
    --tasks NAME` lists them."""
    rendering: Literal["plain", "compact"] = "plain"
    """plain: the question as the library words it, and its own score. compact: one character a
    digit or letter and an exact 0/1 reward, for models with an alphabet of a few characters."""


ENVIRONMENTS: dict[str, CatalogEntry] = {
    "reasoning_gym": CatalogEntry(
        name="reasoning_gym",
        target="onroute.environments.reasoning_gym:ReasoningGym",
        summary="Endless generated problems of any reasoning-gym task, scored by the library.",
        options=ReasoningGymOptions,
        properties=frozenset({"demonstrates"}),
    )
}
"""Constructed as `target(options, codec=…, stop_token_ids=…, held_out=…, seed=…)`."""
