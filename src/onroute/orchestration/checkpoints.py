"""The checkpoints of a run: which are there, and which stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onroute.orchestration.folder import numbered, step_of
from onroute.training.folders import remove, replaced_name


@dataclass(slots=True)
class BestStep:
    """The first step at which a metric was as high as it ever was; no step while it was not measured."""

    metric: str
    step: int | None = None
    value: float = -math.inf

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a step, in the order of the steps. NaN counts as not measured."""
        value = metrics.get(self.metric, math.nan)
        if value > self.value:
            self.step, self.value = step, value


def saved_steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in `folder` by step, ascending; one whose replacement was cut short is the old one.

    Half-written ones are none.
    """
    found = numbered(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        step = step_of(replaced_name(path) or "")
        if step is not None:
            found.setdefault(step, path)
    return dict(sorted(found.items()))


def rotate(folder: Path, *, newest: int, keep: int, best: int | None) -> None:
    """Remove all checkpoints in `folder` but the last `keep` up to step `newest`, and the first at or
    after step `best`. Those after `newest` are of a past that a resumed run has left."""
    saved = numbered(folder)
    own = [step for step in saved if step <= newest]
    kept = set(own[-keep:])
    if best is not None:
        kept |= set([step for step in own if step >= best][:1])
    for step in sorted(saved.keys() - kept, reverse=True):
        remove(saved[step])
