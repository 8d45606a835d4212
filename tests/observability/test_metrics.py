from __future__ import annotations

import logging
import math

import pytest
import torch

from onroute.core.errors import MachineError, UserError
from onroute.observability.catalog import TRACKERS
from onroute.observability.metrics import Metrics, open_metrics
from onroute.observability.trackers.jsonl import read_metrics
from tests.disk import PAGE, Disk


class Recording:
    """Refuses a step below the last one, as trackers with one global step do for a series."""

    def __init__(self):
        self.points, self.closed = [], 0

    def log(self, step, metrics):
        for name, value in metrics.items():
            assert all(step >= s for s, n, _ in self.points if n == name)
            self.points.append((step, name, value))

    def close(self):
        self.closed += 1


class Broken(Recording):
    calls = 0

    def log(self, step, metrics):
        self.calls += 1
        raise ConnectionError("server is gone")


def test_every_tracker_and_the_file_get_every_point(tmp_path):
    one, two = Recording(), Recording()
    with Metrics(tmp_path, [one, two]) as metrics:
        metrics.log(1, {"a": 0.5, "b": torch.tensor(2.0)})
    assert one.points == two.points == [(1, "a", 0.5), (1, "b", 2.0)]
    assert dict(read_metrics(tmp_path / "metrics.jsonl")[0].values) == {"a": 0.5, "b": 2.0}


def test_a_tracker_that_raises_gives_one_warning_and_the_run_goes_on(tmp_path, caplog):
    broken, sound = Broken(), Recording()
    with Metrics(tmp_path, [broken, sound]) as metrics:
        for step in range(5):
            metrics.log(step, {"a": step})
    assert broken.calls == 1
    assert [step for step, _, _ in sound.points] == [0, 1, 2, 3, 4]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    (warning,) = caplog.records
    assert "Broken" in warning.getMessage()
    assert "server is gone" in warning.getMessage()


def test_metrics_that_do_not_fit_on_the_disk_end_the_run_and_the_file_stays_whole(disk: Disk, caplog):
    path = disk.path / "metrics.jsonl"
    with Metrics(disk.path) as metrics:
        metrics.log(1, {"a": 1})
        disk.leave(0)
        with pytest.raises(MachineError, match=rf"machine-disk\] no space left on the disk; {path}; free"):
            for step in range(2, PAGE):  # what is left of the first page takes some more
                metrics.log(step, {"a": step})
    rows = read_metrics(path)
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    assert path.read_bytes().endswith(b"}\n")
    assert not caplog.records


def test_steps_of_one_series_never_go_backwards_and_series_do_not_hinder_each_other(tmp_path, caplog):
    tracker = Recording()
    with Metrics(tmp_path, [tracker]) as metrics:
        for step in range(1, 6):
            metrics.log(step, {"train/loss": step})
            if step % 2 == 0:
                metrics.log(step, {"eval/accuracy": step / 10})
        assert not caplog.records
        metrics.log(4, {"train/loss": 99.0, "eval/other": 1.0})
        metrics.log(3, {"train/loss": 99.0})
    evaluated = [(s, v) for s, n, v in tracker.points if n == "eval/accuracy"]
    assert evaluated == [(2, 0.2), (4, 0.4)]
    assert (4, "eval/other", 1.0) in tracker.points
    assert all(value != 99.0 for _, _, value in tracker.points)
    assert len(caplog.records) == 1


def test_a_run_resumed_from_step_3_goes_on_at_4(tmp_path):
    with Metrics(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.log(step, {"a": step})
    with Metrics(tmp_path, resumed_from=3) as metrics:
        metrics.log(2, {"a": 99})
        metrics.log(4, {"a": 40})
    points = [(row.step, row.values["a"]) for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert points == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_the_last_step_is_there_and_all_is_closed_after_an_error(tmp_path):
    tracker = Recording()
    with pytest.raises(RuntimeError), Metrics(tmp_path, [tracker]) as metrics:
        metrics.log(7, {"a": 1})
        raise RuntimeError
    assert tracker.closed == 1
    assert read_metrics(tmp_path / "metrics.jsonl")[-1].step == 7


def test_a_tracker_that_cannot_close_does_not_keep_the_others_open(tmp_path, caplog):
    class Stuck(Recording):
        def close(self):
            raise OSError("stuck")

    last = Recording()
    with Metrics(tmp_path, [Stuck(), last]):
        pass
    assert last.closed == 1
    assert "stuck" in caplog.text


def test_nan_is_passed_on_and_what_is_no_number_is_left_out_with_one_warning(tmp_path, caplog):
    tracker = Recording()
    with Metrics(tmp_path, [tracker]) as metrics:
        metrics.log(0, {"grad": float("nan"), "none": None, "text": "x", "empty": torch.ones(0)})
        metrics.log(1, {"text": "x"})
    ((step, name, value),) = tracker.points
    assert (step, name, math.isnan(value)) == (0, "grad", True)
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2  # text once, empty once


def test_every_tracker_of_the_catalogue_takes_any_number_and_closes(tmp_path, caplog):
    with open_metrics(tmp_path, TRACKERS) as metrics:
        metrics.log(0, {"train/loss": 0.5, "train/grad_norm": float("nan"), "x": float("inf")})
        metrics.log(1, {"train/loss": 0.25})
    assert not caplog.records
    with open_metrics(tmp_path, TRACKERS, resumed_from=0) as metrics:
        metrics.log(1, {"train/loss": 0.125})
    assert not caplog.records


def test_an_unknown_tracker_is_refused_with_those_that_exist(tmp_path):
    with pytest.raises(UserError, match=r"observability-unknown-tracker.*'wandbb'.*tensorboard"):
        open_metrics(tmp_path, ["wandbb"])
