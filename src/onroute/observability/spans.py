"""How long the phases of a step take."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onroute.core.files import replacing

_MAX_EVENTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """One finished span. Times are seconds on a clock that starts with its `Spans`."""

    name: str
    start_s: float
    end_s: float
    thread: int


class Spans:
    """Named stretches of time; they may nest, and overlap between threads and async tasks.

    Time counts once a name: while several spans of one name are open, only the clock's own seconds
    count. A span inside another of a different name counts for both.

    clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._origin = clock()
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._events: deque[SpanEvent] = deque(maxlen=_MAX_EVENTS)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the time of the body under `name`, also when it raises."""
        start = self._begin(name)
        try:
            yield
        finally:
            self._end(name, start)

    def take(self) -> dict[str, float]:
        """Seconds since the last call as `time/<name>_s`; an open span is counted up to now."""
        with self._lock:
            now = self._clock()
            for name in self._open:
                self._add(name, now - self._since[name])
                self._since[name] = now
            totals, self._totals = self._totals, {}
        return {f"time/{name}_s": seconds for name, seconds in totals.items()}

    @property
    def events(self) -> tuple[SpanEvent, ...]:
        """The last 100,000 finished spans, in the order they ended."""
        return tuple(self._events)

    def write_trace(self, path: Path) -> None:
        """The events as Chrome trace JSON, for chrome://tracing or ui.perfetto.dev. Raises MachineError
        when it can't be written."""
        threads: dict[int, int] = {}
        events = [
            {
                "name": event.name,
                "ph": "X",
                "ts": round(event.start_s * 1e6, 1),
                "dur": round((event.end_s - event.start_s) * 1e6, 1),
                "pid": os.getpid(),
                "tid": threads.setdefault(event.thread, len(threads)),
            }
            for event in self.events
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as writing:
            writing.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def _begin(self, name: str) -> float:
        with self._lock:
            now = self._clock()
            if name not in self._open:
                self._since[name] = now
            self._open[name] = self._open.get(name, 0) + 1
            return now

    def _end(self, name: str, start: float) -> None:
        with self._lock:
            now = self._clock()
            self._events.append(
                SpanEvent(
                    name=name,
                    start_s=start - self._origin,
                    end_s=now - self._origin,
                    thread=threading.get_ident(),
                )
            )
            self._open[name] -= 1
            if self._open[name] == 0:
                del self._open[name]
                self._add(name, now - self._since.pop(name))

    def _add(self, name: str, seconds: float) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + seconds
