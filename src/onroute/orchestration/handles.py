"""What a driver drives: protocols that hide where the other end lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from onroute.core.batches import StepReport
from onroute.core.engine import Engine
from onroute.core.samples import Group, Json, Sample
from onroute.core.weights import WeightVersion


class TrainerHandle(Protocol):
    """All trainer ranks as one. Every method returns when all ranks are done and raises the first
    failing rank's error."""

    async def train(self, groups: Sequence[Group]) -> list[StepReport]:
        """One batch, in as many optimizer steps as the run asks for."""
        ...

    async def supervise(self, samples: Sequence[Sample]) -> StepReport:
        """One optimizer step of supervised learning on right answers, by an optimizer of its own."""
        ...

    async def push(self, engines: Sequence[Engine], version: WeightVersion) -> Mapping[str, float]:
        """Bring the current weights to every engine, proved by checksums; metrics of the push."""
        ...

    async def export(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder."""
        ...

    async def save(self, folder: Path, facts: dict[str, Json]) -> None: ...

    async def load(self, folder: Path) -> dict[str, Json]:
        """Restore a checkpoint; the facts that were saved with it."""
        ...
