"""What is due after which step."""

from __future__ import annotations

from pathlib import Path

import pytest

from onroute.observability.progress import Progress
from onroute.orchestration.checkpoints import saved_steps
from onroute.orchestration.driver import SynchronousDriver
from onroute.orchestration.evaluate import Evaluation
from onroute.orchestration.folder import RunFolder
from onroute.orchestration.run import execute
from onroute.orchestration.schedule import Schedule
from tests.orchestration.test_run import series


def due(small_run, what: str, *overrides: str) -> list[int]:
    config = small_run("--run.steps=12", *overrides)
    schedule = Schedule(config, RunFolder(Path(config.run.folder)))
    return [step for step in range(13) if getattr(schedule, what)(step)]


def test_saves_come_every_so_many_steps_or_never(small_run):
    assert due(small_run, "saves", "--checkpoint.every=5") == [0, 5, 10]
    assert due(small_run, "saves", "--checkpoint.every=0") == []


def test_evaluations_come_between_the_first_and_the_last_step(small_run):
    assert due(small_run, "evaluates", "--run.eval_every=4") == [4, 8]
    assert due(small_run, "evaluates", "--run.eval_every=4", "--run.eval_prompts=0") == []
    assert due(small_run, "evaluates", "--run.eval_every=0") == []


def test_the_rollouts_of_some_steps_and_of_the_last_ones_are_recorded(small_run):
    often = ("--checkpoint.record_every=5", "--checkpoint.recorded_steps=3")
    assert due(small_run, "records", *often) == [0, 5, 10, 11, 12]
    assert due(small_run, "records", "--checkpoint.recorded_steps=0") == []


def test_a_file_asks_for_one_checkpoint(small_run):
    config = small_run("--checkpoint.every=0")
    folder = RunFolder(Path(config.run.folder))
    folder.create()
    schedule = Schedule(config, folder)
    folder.save_request.touch()
    assert [schedule.saves(step) for step in (1, 2)] == [True, False]
    assert not folder.save_request.exists()


def test_a_run_saves_when_it_is_asked_to(small_run, monkeypatch):
    config = small_run("--checkpoint.every=0", "--checkpoint.keep=3")
    seen: list[int] = []
    stock = Schedule.saves

    def asked_after_step_2(schedule: Schedule, step: int) -> bool:
        if step == 2:
            (Path(config.run.folder) / "save").touch()
        seen.append(step)
        return stock(schedule, step)

    monkeypatch.setattr(Schedule, "saves", asked_after_step_2)
    execute(config, progress=Progress.silent())
    assert seen == [1, 2, 3, 4]
    assert list(saved_steps(Path(config.run.folder) / "checkpoints")) == [2, 4]


def test_an_evaluation_that_was_cut_short_is_done_when_the_run_goes_on(small_run, monkeypatch):
    often = ("--run.eval_every=2", "--checkpoint.every=2")
    whole, halves = (small_run(*often, folder=name) for name in ("whole", "halves"))
    execute(whole, progress=Progress.silent())
    stock = SynchronousDriver._evaluate

    async def interrupted(driver: SynchronousDriver[object], stage: str) -> Evaluation | None:
        if stage == "step 2":
            raise ConnectionError("the machine went down")
        return await stock(driver, stage)

    with monkeypatch.context() as patch:
        patch.setattr(SynchronousDriver, "_evaluate", interrupted)
        with pytest.raises(ConnectionError):
            execute(halves, progress=Progress.silent())
    assert 2 not in series(Path(halves.run.folder), "eval/accuracy")
    execute(small_run(*often, "--run.resume=auto", folder="halves"), progress=Progress.silent())
    a, b = (series(Path(config.run.folder), "eval/accuracy") for config in (whole, halves))
    assert a == b
    assert 2 in b
