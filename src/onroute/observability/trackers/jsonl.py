"""metrics.jsonl: one JSON object a line, readable while the run goes on."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onroute.core.errors import UserError
from onroute.core.files import naming, replacing
from onroute.core.samples import Json

BEFORE_THE_STEPS = "supervised/"
"""Metrics of the supervised phase. It has steps of its own, all of them before step 1 of the run."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One line of metrics.jsonl. `time` is in seconds since the epoch."""

    step: int
    time: float
    values: Mapping[str, float]


class JsonLines:
    """Appends to one file; every line is in it when `log` returns.

    A number that is not finite is written as "NaN", "Infinity" or "-Infinity", since JSON has none.
    resumed_from: the last step that a resumed run keeps; later lines of the file are dropped, but for
    those of a phase before the first step (`BEFORE_THE_STEPS`). Below 0 it keeps nothing.

    Raises UserError for a broken line in a file to go on with, MachineError when it can't be written.
    """

    def __init__(self, path: Path, *, resumed_from: int | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep_rows(path, resumed_from)
        with naming(path):
            # Without a buffer nothing is left to be written later, e.g. when the file is closed.
            self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, whole or not at all. Raises MachineError when it can't be written."""
        row: dict[str, Json] = {"step": int(step), "time": round(time.time(), 3)}
        row |= {name: _to_json(value) for name, value in metrics.items()}
        line = memoryview(json.dumps(row, allow_nan=False).encode() + b"\n")
        before = self._file.seek(0, os.SEEK_END)
        with naming(self._path):
            try:
                while line:  # what a full disk takes is the begin of a line
                    line = line[self._file.write(line) :]
            except OSError:
                self._file.truncate(before)
                raise

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[MetricRow]:
    """The rows of a metrics.jsonl, in the order they were written.

    A last line that was cut off, as a killed run leaves it, is passed over.
    Raises `UserError` when the file is missing or another line is broken."""
    if not path.is_file():
        what = "there is no metrics file"
        raise UserError("observability-no-metrics", what, str(path), "name the folder of a run")
    *lines, last = path.read_bytes().split(b"\n")
    rows = list(_whole_rows(path, lines).values())
    cut_off = _parse(last)
    return rows if cut_off is None else [*rows, cut_off]


def to_number(value: object) -> float | None:
    """A float out of a Python, numpy or torch scalar; None for everything that is none."""
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # whatever has no __float__ lands below
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _to_json(value: object) -> Json:
    number = to_number(value)
    if number is None:
        return None
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _from_json(value: str | float) -> float:
    return _NON_FINITE[value] if isinstance(value, str) else float(value)


def _parse(line: bytes) -> MetricRow | None:
    try:
        fields: Any = json.loads(line)
        step, moment = int(fields.pop("step")), float(fields.pop("time"))
        values = {name: _from_json(value) for name, value in fields.items() if value is not None}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return MetricRow(step=step, time=moment, values=values)


def _whole_rows(path: Path, lines: Sequence[bytes]) -> dict[int, MetricRow]:
    """The rows of the lines that were not cut off, by line. Raises UserError naming one that is broken."""
    rows = {}
    for number, line in enumerate(lines):
        row = _parse(line)
        if row is not None:
            rows[number] = row
        elif line.strip():
            raise UserError(
                "observability-broken-metrics",
                "a line is no JSON object with step and time",
                f"{path}, line {number + 1}",
                "remove the line",
            )
    return rows


def _keep_rows(path: Path, last_step: int | None) -> None:
    """Rewrite the file without a cut-off last line and without the rows that `last_step` leaves behind."""
    lines = path.read_bytes().split(b"\n")[:-1]
    if last_step is not None and last_step < 0:
        lines = []
    kept = [
        lines[number] + b"\n"
        for number, row in _whole_rows(path, lines).items()
        if last_step is None or row.step <= last_step or _is_before_the_steps(row)
    ]
    with replacing(path) as writing:
        writing.write_bytes(b"".join(kept))


def _is_before_the_steps(row: MetricRow) -> bool:
    return len(row.values) > 0 and all(name.startswith(BEFORE_THE_STEPS) for name in row.values)
