from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from onroute.cli.output import print_json, print_table, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    folder: Path
    reward: float
    curve: tuple[float, ...]


SUMMARY = Summary(folder=Path("runs/a"), reward=float("nan"), curve=(0.5, 1.0))


def test_json_is_strict_and_on_one_line(capsys):
    print_json(SUMMARY)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert json.loads(line) == {"folder": "runs/a", "reward": None, "curve": [0.5, 1.0]}


def test_what_has_no_json_form_is_refused():
    with pytest.raises(TypeError, match="no JSON form for object"):
        to_json(object())


def test_numpy_numbers_are_plain_numbers():
    assert to_json({"a": np.float64(0.5), "b": np.int64(3), "c": np.array([1.0, np.inf])}) == {
        "a": 0.5,
        "b": 3,
        "c": [1.0, None],
    }


def test_cells_of_a_table_are_no_markup(capsys):
    print_table("Run", ("what", "value"), [("note", "[red]x")])
    assert "[red]x" in capsys.readouterr().out
