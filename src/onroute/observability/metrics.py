"""One place that takes the metrics of a run and hands them to every tracker."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from onroute.core.errors import UserError
from onroute.observability.catalog import TRACKERS
from onroute.observability.trackers.base import Tracker
from onroute.observability.trackers.jsonl import JsonLines, to_number

METRICS_FILE = "metrics.jsonl"

_log = logging.getLogger(__name__)


class Metrics:
    """Writes `folder`/metrics.jsonl and feeds `trackers`. Closes them all when left, also by an error.

    The file is the run's own memory, which plots, a resume and its best checkpoint are made of: when it
    can't be written, the run ends. All else costs the run nothing: a tracker that raises is dropped with
    one warning, a value that is no number is left out, and so is a point of a series that lies before
    its last one.
    """

    def __init__(
        self, folder: Path, trackers: Iterable[Tracker] = (), *, resumed_from: int | None = None
    ) -> None:
        self._file = JsonLines(folder / METRICS_FILE, resumed_from=resumed_from)
        self._trackers: list[Tracker] = list(trackers)
        self._last_step: dict[str, int] = {}
        self._first_step = 0 if resumed_from is None else resumed_from
        self._warned: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Metrics of one step: Python, numpy or torch scalars by name. None means not measured.

        Raises MachineError when metrics.jsonl can't be written."""
        accepted: dict[str, float] = {}
        for name, value in metrics.items():
            number = to_number(value)
            last = self._last_step.get(name, self._first_step)
            if number is None:
                if value is not None:
                    kind = type(value).__name__
                    self._warn(f"type:{name}", f"metric {name} is a {kind}, no number: left out")
            elif step < last:
                self._warn(f"step:{name}", f"metric {name} of step {step} came after step {last}: left out")
            else:
                accepted[name] = number
                self._last_step[name] = step
        if accepted:
            self._file.log(step, accepted)
            for tracker in tuple(self._trackers):
                self._feed(tracker, step, accepted)

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                _log.warning("tracker %s failed to close: %s", type(tracker).__name__, error)
        self._trackers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _feed(self, tracker: Tracker, step: int, metrics: Mapping[str, float]) -> None:
        try:
            tracker.log(step, metrics)
        except Exception as error:
            self._trackers.remove(tracker)
            name = type(tracker).__name__
            _log.warning("tracker %s failed at step %d, the run goes on without: %s", name, step, error)

    def _warn(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning(text)


def open_metrics(folder: Path, names: Iterable[str], *, resumed_from: int | None = None) -> Metrics:
    """`Metrics` with the trackers of these names.

    resumed_from: the last step that a resumed run keeps. Raises `UserError` for an unknown tracker
    or one whose package is missing."""
    trackers = [_open_tracker(name, folder, resumed_from) for name in names]
    return Metrics(folder, trackers, resumed_from=resumed_from)


def _open_tracker(name: str, folder: Path, resumed_from: int | None) -> Tracker:
    if name not in TRACKERS:
        raise UserError(
            "observability-unknown-tracker",
            f"there is no tracker {name!r}",
            "tracking.trackers",
            f"choose from: {', '.join(TRACKERS)}",
        )
    module, attribute = TRACKERS[name].target.split(":")
    tracker_type = getattr(importlib.import_module(module), attribute)
    return cast(Tracker, tracker_type(folder, resumed_from=resumed_from))
