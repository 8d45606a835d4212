"""What a run shows while it runs: two live lines on a terminal, plain lines in a log."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Mode = Literal["live", "plain", "silent"]

_PLAIN_SECONDS = 5.0
_PLAIN_SHARE = 0.1
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A metric that is shown, under a short label."""

    metric: str
    label: str
    format: Callable[[float], str]


def duration(seconds: float) -> str:
    """m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _count(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


_SHOWN = (
    Shown(metric="rollout/reward_mean", label="reward", format=lambda v: f"{v:.3f}"),
    Shown(metric="supervised/loss", label="loss", format=lambda v: f"{v:.3f}"),
    Shown(metric="eval/accuracy", label="held-out", format=lambda v: f"{v:.3f}"),
    Shown(metric="mismatch/k3", label="k3", format=lambda v: f"{v:.1e}"),
    Shown(metric="routing/agreement", label="routes", format=lambda v: f"{100 * v:.1f}%"),
    Shown(metric="perf/tokens_per_s", label="tok/s", format=_count),
)
_CURVES = ("rollout/reward_mean", "supervised/loss")
"""Metrics that get a small curve; the first one present is drawn."""


class Phase:
    """One phase of a run, e.g. the RL steps. A context manager; made by `Progress.phase`."""

    def __init__(
        self, title: str, *, total: int, start: int, sink: _Sink, clock: Callable[[], float]
    ) -> None:
        self.title = title
        self.total = total
        self.step = start
        self._start_step = start
        self._sink = sink
        self._clock = clock
        self._begun = clock()
        self._values: dict[str, float] = {}
        self._curve: list[float] = []

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps are done. `metrics` under their published names; the others are kept from
        the last update, and those that are not shown are passed over."""
        self.step = step
        self._values.update({s.metric: float(metrics[s.metric]) for s in _SHOWN if s.metric in metrics})
        curve = next((metrics[name] for name in _CURVES if name in metrics), None)
        if curve is not None and math.isfinite(curve):
            self._curve.append(float(curve))
        self._sink.show(self)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._begun

    @property
    def left_s(self) -> float | None:
        """Seconds left at the pace so far; None before the first step is done."""
        done = self.step - self._start_step
        return self.elapsed_s / done * (self.total - self.step) if done > 0 else None

    def shown(self) -> list[tuple[str, str]]:
        """Labels and formatted values of what is known, in a fixed order."""
        return [(s.label, s.format(self._values[s.metric])) for s in _SHOWN if s.metric in self._values]

    def time_note(self) -> str:
        left = self.left_s
        if self.step >= self.total:
            return f"{duration(self.elapsed_s)} in all"
        return "" if left is None else f"{duration(left)} left"

    def spark(self) -> str:
        """The course of the first metric in `_CURVES`, as a row of bars."""
        if len(self._curve) < 2:
            return ""
        width = min(_SPARK_WIDTH, len(self._curve))
        edges = [round(i * len(self._curve) / width) for i in range(width + 1)]
        means = [sum(self._curve[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
        low, high = min(means), max(means)
        scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
        return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)

    def __enter__(self) -> Self:
        self._begun = self._clock()
        self._sink.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sink.end(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None, None):
            head.add_column(ratio=ratio, no_wrap=True)
        head.add_row(
            Text(self.title.ljust(8), style="bold"),
            ProgressBar(
                total=max(self.total, 1), completed=self.step, complete_style="cyan", finished_style="green"
            ),
            Text(f"{self.step}/{self.total}"),
            Text(self.time_note().rjust(12), style="dim"),
        )
        line = Text("  ", no_wrap=True, overflow="ellipsis")
        for index, (label, value) in enumerate(self.shown()):
            line.append("  " if index else "").append(label + " ", style="dim").append(value)
            if index == 0 and self._curve:
                line.append(" " + self.spark(), style="cyan")
        yield head
        yield line


class _Sink(Protocol):
    def begin(self, phase: Phase) -> None: ...

    def show(self, phase: Phase) -> None: ...

    def end(self, phase: Phase) -> None: ...

    def close(self) -> None: ...


class _LiveSink:
    """Redraws two lines in place; they stay when the phase ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def begin(self, phase: Phase) -> None:
        self.close()
        self._live = Live(phase, console=self._console, refresh_per_second=2)
        self._live.start()

    def show(self, phase: Phase) -> None:
        if self._live is not None:
            self._live.refresh()

    def end(self, phase: Phase) -> None:
        self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class _PlainSink:
    """A line at the first and the last step, and between them after 5 seconds or a tenth of the
    steps, whichever comes first."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._last_time = -math.inf
        self._last_step = 0

    def begin(self, phase: Phase) -> None:
        self._last_time = -math.inf
        self._last_step = phase.step

    def show(self, phase: Phase) -> None:
        now = self._clock()
        is_due = now - self._last_time >= _PLAIN_SECONDS
        is_far = phase.step - self._last_step >= _PLAIN_SHARE * phase.total
        if is_due or is_far or phase.step >= phase.total:
            self._last_time, self._last_step = now, phase.step
            values = "".join(f"  {label} {value}" for label, value in phase.shown())
            text = f"{phase.title} {phase.step}/{phase.total}{values}  {phase.time_note()}".rstrip()
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self, phase: Phase) -> None: ...

    def close(self) -> None: ...


class _SilentSink:
    def begin(self, phase: Phase) -> None: ...

    def show(self, phase: Phase) -> None: ...

    def end(self, phase: Phase) -> None: ...

    def close(self) -> None: ...


class Progress:
    """Shows one phase after the other.

    `with Progress.open(console) as progress, progress.phase("RL", total=80) as phase:
    phase.update(1, metrics)`
    """

    def __init__(
        self, console: Console | None, mode: Mode, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._sink: _Sink = _SilentSink()
        if console is not None and mode == "live":
            self._sink = _LiveSink(console)
        elif console is not None and mode == "plain":
            self._sink = _PlainSink(console, clock)

    @classmethod
    def open(cls, console: Console) -> Progress:
        """Live on a terminal, plain lines otherwise."""
        return cls(console, "live" if console.is_terminal and not console.is_dumb_terminal else "plain")

    @classmethod
    def silent(cls) -> Progress:
        """Shows nothing."""
        return cls(None, "silent")

    def phase(self, title: str, *, total: int, start: int = 0) -> Phase:
        """A phase of `total` steps, of which a resumed run has done `start`."""
        return Phase(title, total=total, start=start, sink=self._sink, clock=self._clock)

    def note(self, text: str) -> None:
        """One line of its own, above what is live."""
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sink.close()
