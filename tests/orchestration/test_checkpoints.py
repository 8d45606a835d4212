"""Which checkpoints are found, and which stay."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from onroute.orchestration.checkpoints import BestStep, rotate, saved_steps
from onroute.orchestration.folder import step_path


def with_steps(folder: Path, *steps: int) -> Path:
    for step in steps:
        step_path(folder, step).mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (1, None, [12]),
        (2, None, [10, 12]),
        (9, None, [2, 4, 6, 8, 10, 12]),
        (2, 4, [4, 10, 12]),  # saved and evaluated at the same step
        (2, 5, [6, 10, 12]),  # evaluated between two saves: the first one after
        (2, 0, [2, 10, 12]),  # the model as it began: the first one there is
        (2, 10, [10, 12]),  # among the last ones anyhow
        (1, 12, [12]),
        (1, 13, [12]),  # its checkpoint is still to come
    ],
)
def test_the_last_ones_stay_and_the_first_at_or_after_the_best_step(
    tmp_path: Path, keep: int, best: int | None, left: list[int]
):
    folder = with_steps(tmp_path, 2, 4, 6, 8, 10, 12)
    rotate(folder, newest=12, keep=keep, best=best)
    assert list(saved_steps(folder)) == left
    assert len(list(folder.iterdir())) == len(left)


def test_checkpoints_of_a_past_that_was_left_go(tmp_path: Path):
    """Resumed from 4 and saved 5: neither 8 nor 10 may pass for the newest one."""
    folder = with_steps(tmp_path, 2, 4, 5, 8, 10)
    rotate(folder, newest=5, keep=2, best=None)
    assert list(saved_steps(folder)) == [4, 5]


def test_half_written_and_half_removed_folders_are_no_checkpoints(tmp_path: Path):
    with_steps(tmp_path, 2)
    for name in (".step-000004.writing", ".step-000001.removing", "step-3", "notes"):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == {2: tmp_path / "step-000002"}
    assert saved_steps(tmp_path / "nowhere") == {}


def test_a_checkpoint_that_stepped_aside_is_found_until_its_successor_is_there(tmp_path: Path):
    with_steps(tmp_path, 2)
    (tmp_path / ".step-000004.replaced").mkdir()
    assert saved_steps(tmp_path)[4] == tmp_path / ".step-000004.replaced"
    with_steps(tmp_path, 4)
    assert saved_steps(tmp_path)[4] == tmp_path / "step-000004"


def test_the_best_step_is_the_first_of_the_highest_values():
    best = BestStep("eval/accuracy")
    values = {2: 0.25, 4: 0.5, 6: math.nan, 8: 0.5, 10: 0.375}
    for step, value in values.items():
        best.see(step, {"eval/accuracy": value, "train/loss": -step})
        best.see(step, {"train/loss": 9.0})
    assert (best.step, best.value) == (4, 0.5)


def test_without_a_metric_there_is_no_best_step():
    best = BestStep("")
    best.see(1, {"eval/accuracy": 1.0})
    assert best.step is None
