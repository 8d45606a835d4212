"""What a driver drives: protocols that hide where the other end lives.

A driver never holds the arrays of a sample. It holds a `Rollout`: facts to plan with, and something that
only the trainer's handle can turn into samples. `Held` is that something, e.g. the group itself in one
process, or a reference into an object store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from onroute.core.batches import StepReport
from onroute.core.engine import Engine
from onroute.core.samples import Json, Prompt, Sample, SampleFacts
from onroute.core.sampling import SamplingParams
from onroute.core.weights import WeightVersion

Held = TypeVar("Held")
Held_co = TypeVar("Held_co", covariant=True)
Held_contra = TypeVar("Held_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout(Generic[Held_co]):
    """The checked samples of one prompt, where they lie."""

    prompt_id: str
    facts: tuple[SampleFacts, ...]
    held: Held_co


class RolloutHandle(Protocol[Held_co]):
    """Environments and the engine they ask, as one."""

    async def rollout(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, n: int, sampling: SamplingParams
    ) -> Sequence[Rollout[Held_co]]:
        """`n` samples of each prompt, scored and checked, in the order of `prompts`.

        Started together, so that the engine sees them as one batch. The first failure cancels the
        others and is the one that is raised.
        """
        ...


class TrainerHandle(Protocol[Held_contra]):
    """All trainer ranks as one. Every method returns when all ranks are done and raises the first
    failing rank's error."""

    async def train(self, rollouts: Sequence[Rollout[Held_contra]]) -> list[StepReport]:
        """One batch, in as many optimizer steps as the run asks for."""
        ...

    async def supervise(self, samples: Sequence[Sample]) -> StepReport:
        """One optimizer step of supervised learning on right answers, by an optimizer of its own."""
        ...

    async def push(self, engines: Sequence[Engine], version: WeightVersion) -> Mapping[str, float]:
        """Bring the current weights to every engine, proved by checksums; metrics of the push."""
        ...

    async def record(self, folder: Path, step: int, rollouts: Sequence[Rollout[Held_contra]]) -> None:
        """Keep the rollouts of a step in `folder`, beside the current weights, which sampled them."""
        ...

    async def save(self, folder: Path, facts: dict[str, Json]) -> None: ...

    async def load(self, folder: Path) -> dict[str, Json]:
        """Restore a checkpoint; the facts that were saved with it."""
        ...
