"""What a command prints: a table for people, one line of JSON for programs."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from onroute.core.samples import Json


def print_json(value: object) -> None:
    """One line of strict JSON. Dataclasses become objects; a number that is not finite becomes null."""
    print(json.dumps(to_json(value), allow_nan=False, ensure_ascii=False), flush=True)


def to_json(value: object) -> Json:
    """The JSON form of records, mappings, sequences, paths and numpy scalars.

    Raises:
        TypeError: `value` is of a kind that has no JSON form.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [to_json(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table as wide as the terminal; its cells are text and never markup."""
    table = Table(title=title, title_justify="left", highlight=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    Console().print(table)
