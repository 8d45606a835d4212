"""What `algorithm.advantage` and `algorithm.loss` may name, with the keys of each; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from onroute.core.config.catalog import CatalogEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoOptions:
    normalize_std: bool = True
    """Divide by the standard deviation of the group's rewards; false keeps the rewards' scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedOptions:
    clip_low: float = 0.2
    """A token whose probability fell below 1 - clip_low of its old one is pushed down no further; 0 to 1."""
    clip_high: float = 0.28
    """A token whose probability rose above 1 + clip_high times its old one is pushed up no further; >= 0."""
    dual_clip: float | None = None
    """Bound the loss of a bad token at this many times its advantage; above 1. Leave the key out for no
    bound."""

    def __post_init__(self) -> None:
        # ValueError, because the loader of run files collects it beside all other violations.
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low is {self.clip_low}, must be between 0 and 1")
        if not 0.0 <= self.clip_high < float("inf"):
            raise ValueError(f"clip_high is {self.clip_high}, must be a finite number >= 0")
        if self.dual_clip is not None and not 1.0 < self.dual_clip < float("inf"):
            raise ValueError(f"dual_clip is {self.dual_clip}, must be a finite number above 1, or left out")


ADVANTAGES: dict[str, CatalogEntry] = {
    "grpo": CatalogEntry(
        name="grpo",
        target="onroute.algorithms.advantages.grpo:grpo",
        summary="Reward minus the mean of its group, divided by the group's standard deviation",
        options=GrpoOptions,
        properties=frozenset({"needs_groups"}),
    ),
}

LOSSES: dict[str, CatalogEntry] = {
    "clipped": CatalogEntry(
        name="clipped",
        target="onroute.algorithms.losses.clipped:clipped",
        summary="Clipped probability ratio of PPO, with the higher upper bound of DAPO",
        options=ClippedOptions,
        properties=frozenset({"needs_advantages", "needs_old_log_probs"}),
    ),
    "supervised": CatalogEntry(
        name="supervised",
        target="onroute.algorithms.losses.supervised:supervised",
        summary="Negative log-likelihood of every loss token, whatever its reward",
    ),
}
