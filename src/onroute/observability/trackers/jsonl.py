"""metrics.jsonl: one JSON object a line, readable while the run goes on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onroute.core.errors import UserError
from onroute.core.samples import Json

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One line of metrics.jsonl. `time` is in seconds since the epoch."""

    step: int
    time: float
    values: Mapping[str, float]


class JsonLines:
    """`Tracker` that appends to one file; every line is on disk when `log` returns.

    A number that is not finite is written as "NaN", "Infinity" or "-Infinity", since JSON has none.
    resumed_from: the last step that a resumed run keeps; later lines of the file are dropped.
    """

    def __init__(self, path: Path, *, resumed_from: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep_rows(path, resumed_from)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row: dict[str, Json] = {"step": int(step), "time": round(time.time(), 3)}
        row |= {name: _to_json(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[MetricRow]:
    """The rows of a metrics.jsonl, in the order they were written.

    A last line that was cut off, as a killed run leaves it, is passed over.
    Raises `UserError` when the file is missing or another line is broken."""
    if not path.is_file():
        what = "there is no metrics file"
        raise UserError("observability-no-metrics", what, str(path), "name the folder of a run")
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise UserError(
                "observability-broken-metrics",
                "a line is no JSON object with step and time",
                f"{path}, line {number}",
                "remove the line",
            )
    return rows


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
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return MetricRow(step=step, time=moment, values=values)


def _keep_rows(path: Path, last_step: int | None) -> None:
    """Rewrite the file without a cut-off last line and without rows after `last_step`."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        row = _parse(line)
        later = row is not None and last_step is not None and row.step > last_step
        if line.endswith(b"\n") and not later:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)
