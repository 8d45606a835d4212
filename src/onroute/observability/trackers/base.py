"""What a tracker is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """Takes the metrics of a run. What it raises costs the run this tracker and nothing more."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step. Steps of one series never go backwards; values may be NaN."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...
