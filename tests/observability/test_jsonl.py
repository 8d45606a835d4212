from __future__ import annotations

import json
import math
from decimal import Decimal

import numpy as np
import pytest
import torch

from onroute.core.errors import UserError
from onroute.observability.trackers.jsonl import JsonLines, read_metrics


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_a_line_is_on_disk_when_log_returns_with_step_time_and_metrics(tmp_path):
    tracker = JsonLines(tmp_path / "metrics.jsonl")
    tracker.log(3, {"train/loss": 0.5, "train/tokens": 12.0})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["step"], line["train/loss"], line["train/tokens"]) == (3, 0.5, 12)
    assert line["time"] > 1.7e9  # seconds since 1970
    tracker.close()


def test_everything_a_trainer_may_log_is_written_as_strict_json(tmp_path):
    values = {
        "int64": np.int64(3),
        "float32": np.float32(0.5),
        "bfloat16": torch.tensor(2.0, dtype=torch.bfloat16),
        "one": torch.ones(1, 1),
        "many": torch.ones(2),
        "empty": torch.ones(0),
        "bytes": b"abc",
        "text": "abc",
        "none": None,
        "bool": np.True_,
        "decimal": Decimal("0.25"),
        "nan": math.nan,
        "up": np.float64("inf"),
        "down": torch.tensor(-math.inf),
        "object": object(),
    }
    tracker = JsonLines(tmp_path / "m.jsonl")
    tracker.log(np.int64(1), values)
    tracker.close()
    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert {name: line[name] for name in values} == {
        "int64": 3,
        "float32": 0.5,
        "bfloat16": 2,
        "one": 1,
        "many": None,
        "empty": None,
        "bytes": None,
        "text": None,
        "none": None,
        "bool": 1,
        "decimal": 0.25,
        "nan": "NaN",
        "up": "Infinity",
        "down": "-Infinity",
        "object": None,
    }


def test_what_is_read_is_what_was_logged(tmp_path):
    tracker = JsonLines(tmp_path / "m.jsonl")
    tracker.log(0, {"a": 0.1, "b": math.nan, "c": -math.inf})
    tracker.log(1, {"a": 1e-12})
    first, second = read_metrics(tmp_path / "m.jsonl")
    assert (first.step, first.values["a"], first.values["c"]) == (0, 0.1, -math.inf)
    assert math.isnan(first.values["b"])
    assert (second.step, dict(second.values)) == (1, {"a": 1e-12})


@pytest.mark.parametrize(
    "tail", ['{"step": 2, "ti', '{"step": 2', "{", '{"step": 2, "time": 5.0, "a": "\\u00']
)
def test_a_last_line_that_was_cut_off_is_passed_over_and_not_built_upon(tmp_path, tail):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "time": 5.0, "a": 2}\n' + tail)
    assert [row.step for row in read_metrics(path)] == [1]
    JsonLines(path).log(2, {"a": 3})
    assert [(row.step, row.values["a"]) for row in read_metrics(path)] == [(1, 2.0), (2, 3.0)]


def test_a_broken_line_in_the_middle_is_refused_by_its_number(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "time": 5.0}\nnot json\n{"step": 2, "time": 5.0}\n')
    with pytest.raises(UserError, match=r"observability-broken-metrics.*line 2"):
        read_metrics(path)
    with pytest.raises(UserError, match="observability-no-metrics"):
        read_metrics(tmp_path / "absent.jsonl")


def test_a_broken_line_is_told_when_a_run_goes_on_and_not_when_nothing_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    content = '{"step": 1, "time": 5.0, "a": 1}\n\x00\x00\n{"step": 2, "time": 5.0, "a": 2}\n'
    path.write_text(content)
    for resumed_from in (2, 1, None):
        with pytest.raises(
            UserError, match=r"observability-broken-metrics.*m\.jsonl, line 2; remove the line"
        ):
            JsonLines(path, resumed_from=resumed_from)
        assert path.read_text() == content
    JsonLines(path, resumed_from=-1)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ['{"step": 1e999, "time": 5}', "[" * 100_000, "NaN", '{"a": 1}', "3"])
def test_a_line_of_json_that_is_no_row_is_a_broken_one(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match="line 1"):
        read_metrics(path)


def test_rows_of_the_supervised_phase_stay_whatever_step_a_run_goes_on_from(tmp_path):
    path = tmp_path / "m.jsonl"
    tracker = JsonLines(path)
    for step in (1, 2, 3):
        tracker.log(step, {"supervised/loss": step, "supervised/skipped": 0})
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 10 * step})
    tracker.close()
    JsonLines(path, resumed_from=1)
    kept = [(row.step, *row.values) for row in read_metrics(path)]
    supervised = ("supervised/loss", "supervised/skipped")
    assert kept == [(1, *supervised), (2, *supervised), (3, *supervised), (1, "train/loss")]


def test_a_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    tracker = JsonLines(path)
    for step in range(6):
        tracker.log(step, {"a": step})
    tracker.close()
    JsonLines(path, resumed_from=3).log(4, {"a": 40})
    assert [(row.step, row.values["a"]) for row in read_metrics(path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
    ]
