from __future__ import annotations

import sys

import pytest

from onroute.core.errors import UserError
from onroute.observability.trackers.tensorboard import TensorBoard


def read_back(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(p.step, p.value) for p in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_back_the_points_under_their_steps(tmp_path):
    tracker = TensorBoard(tmp_path)
    tracker.log(1, {"train/loss": 0.5})
    tracker.log(2, {"train/loss": 0.25, "eval/accuracy": 1.0})
    tracker.close()
    assert read_back(tmp_path) == {"train/loss": [(1, 0.5), (2, 0.25)], "eval/accuracy": [(2, 1.0)]}


def test_a_resumed_run_replaces_the_points_after_its_checkpoint(tmp_path):
    tracker = TensorBoard(tmp_path)
    for step in range(1, 5):
        tracker.log(step, {"a": step})
    tracker.close()
    resumed = TensorBoard(tmp_path, resumed_from=2)
    resumed.log(3, {"a": 30.0})
    resumed.close()
    assert read_back(tmp_path)["a"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_without_the_package_the_extra_to_install_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"observability-missing-package.*onroute\[tracking\]"):
        TensorBoard(tmp_path)
