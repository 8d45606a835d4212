"""What a run came to, for people: used by every command that runs one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onroute.cli.output import print_table

if TYPE_CHECKING:
    from onroute.algorithms.bootstrap import Interval
    from onroute.orchestration.run import RunSummary

_STAGES = {"before": "before", "after_supervised": "after the warm-up", "after": "after RL"}


def print_accuracy(summary: RunSummary) -> None:
    """Held-out accuracy by stage, and what RL alone gained."""
    rows = [
        (label, _interval(summary.accuracy[name]))
        for name, label in _STAGES.items()
        if name in summary.accuracy
    ]
    if summary.lift is not None:
        rows.append(("gained by RL alone", _interval(summary.lift)))
    if rows:
        print_table("Held-out accuracy, sampled", ("", "accuracy (95 % interval)"), rows)


def print_places(summary: RunSummary, pictures: Sequence[Path] = ()) -> None:
    """Where the run folder and the plots are, and how long it took."""
    seconds = summary.seconds
    print(f"run folder  {summary.run}  ({seconds['total']:.0f} s, of which RL {seconds['rl']:.0f} s)")
    for path in (*summary.plots, *map(str, pictures)):
        print(f"plot        {path}")


def _interval(interval: Interval) -> str:
    return f"{interval.value:.3f}  ({interval.low:.3f} … {interval.high:.3f})"
