"""A run goes on from the checkpoint that is asked for, and from no other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from onroute.cli.catalogs import CATALOGS
from onroute.core.config.load import load_config
from onroute.core.config.sections import RunConfig
from onroute.core.errors import MachineError, UserError
from onroute.observability.progress import Progress
from onroute.orchestration.checkpoints import saved_steps
from onroute.orchestration.folder import RunFolder, step_path
from onroute.orchestration.resume import config_facts, find_resumption
from onroute.orchestration.run import execute
from onroute.training.marker import Marker, write_marker
from tests.disk import Disk
from tests.orchestration.conftest import QUICKSTART, SMALL, merged
from tests.orchestration.test_run import LEARNED, series


def saved_by(config: RunConfig, *steps: int) -> RunFolder:
    """A run folder with markers of these steps, and nothing else in the checkpoints."""
    folder = RunFolder(Path(config.run.folder))
    for step in steps:
        path = step_path(folder.checkpoints, step)
        path.mkdir(parents=True)
        facts = {"step": step, "config": config_facts(config)}
        write_marker(path, Marker(ranks=1, files={}, facts=facts))
    return folder


def test_never_finds_nothing_auto_the_newest_and_a_number_that_step(small_run):
    folder = saved_by(small_run(), 1, 2, 4)

    def found(how: str) -> tuple[int, tuple[int, ...]] | None:
        resumption = find_resumption(folder, small_run(f"--run.resume={how}"))
        return None if resumption is None else (resumption.step, resumption.later)

    assert found("never") is None
    assert found("auto") == (4, ())
    assert found("2") == (2, (4,))


def test_auto_in_a_new_folder_begins_and_a_number_is_refused(small_run):
    config = small_run("--run.resume=auto")
    folder = RunFolder(Path(config.run.folder))
    assert find_resumption(folder, config) is None
    with pytest.raises(UserError, match=r"resume-step\] there is no checkpoint of step 3; there are: none"):
        find_resumption(folder, small_run("--run.resume=3"))


def test_a_step_that_is_not_there_is_refused_with_those_that_are(small_run):
    folder = saved_by(small_run(), 2, 4)
    with pytest.raises(UserError, match=r"no checkpoint of step 3; there are: 2, 4;.*checkpoints; set"):
        find_resumption(folder, small_run("--run.resume=3"))


def test_a_checkpoint_beyond_the_last_step_is_refused(small_run):
    folder = saved_by(small_run(), 2, 4)
    with pytest.raises(UserError, match=r"resume-steps\] .* of step 4, the run ends with step 3"):
        find_resumption(folder, small_run("--run.resume=auto", "--run.steps=3"))


@pytest.mark.parametrize(
    ("how", "advice"),
    [("auto", "--run.resume=2 goes on"), ("2", "--run.resume=1 goes on"), ("1", "--run.resume=4 goes on")],
)
def test_a_damaged_checkpoint_is_named_with_the_one_to_ask_for(small_run, how, advice):
    folder = saved_by(small_run(), 1, 2, 4)
    config = small_run(f"--run.resume={how}")
    step = 4 if how == "auto" else int(how)
    (step_path(folder.checkpoints, step) / "complete.json").unlink()
    with pytest.raises(UserError, match=rf"checkpoint-damaged.*step-00000{step}.*{advice}"):
        find_resumption(folder, config)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("--run.seed=7", "run.seed 0 -> 7"),
        ("--environment.options.parameters={min_numbers=3,max_numbers=4}", "environment.options"),
    ],
)
def test_what_makes_it_another_run_is_refused_by_name(small_run, override, told):
    folder = saved_by(small_run(), 2)
    with pytest.raises(UserError, match=rf"resume-config\] the checkpoint is of another run: {told}"):
        find_resumption(folder, small_run("--run.resume=auto", override))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("--optimizer.lr=0.25", ["optimizer.lr 0.0005 -> 0.25"]),
        ("--data.optimizer_steps=2", ["data.optimizer_steps 1 -> 2"]),
        ("--algorithm.loss_options.clip_low=0.125", ["algorithm.loss_options"]),
        ("--optimizer.betas=[0.5,0.75]", ["optimizer.betas [0.9, 0.99] -> [0.5, 0.75]"]),
        ("--run.eval_every=1", []),
        ("--run.steps=9", []),
        ("--checkpoint.keep=5", []),
        ("--checkpoint.best=eval/accuracy", []),
        ("--tracking.plots=true", []),
    ],
)
def test_what_changes_the_steps_to_come_is_told_and_the_rest_is_not(small_run, override, told):
    base = small_run("--optimizer.lr=5e-4", "--optimizer.schedule=constant")
    folder = saved_by(base, 2)
    now = small_run("--optimizer.lr=5e-4", "--optimizer.schedule=constant", "--run.resume=auto", override)
    resumption = find_resumption(folder, now)
    assert resumption is not None
    assert [line[: len(text)] for line, text in zip(resumption.changed, told, strict=True)] == told
    assert len(resumption.notes()) == 1 + len(told)


def test_the_number_of_steps_is_told_where_the_schedule_depends_on_it(small_run):
    folder = saved_by(small_run("--optimizer.schedule=cosine"), 2)
    now = small_run("--optimizer.schedule=cosine", "--run.resume=auto", "--run.steps=9")
    resumption = find_resumption(folder, now)
    assert resumption is not None
    assert resumption.changed == ("run.steps 4 -> 9",)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, demo_model) -> Path:
    """Four steps, checkpoints after 2 and 4. Not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    places = (f"--model.path={demo_model}", f"--run.folder={folder}")
    execute(load_config(QUICKSTART, merged(*places, *SMALL), CATALOGS), progress=Progress.silent())
    return folder


@pytest.fixture
def copied(finished: Path, small_run) -> Callable[..., RunConfig]:
    """A config that resumes in a copy of that run."""

    def build(*overrides: str) -> RunConfig:
        config = small_run("--run.resume=auto", *overrides)
        shutil.copytree(finished, config.run.folder, dirs_exist_ok=True)
        return config

    return build


def test_from_an_earlier_step_the_run_goes_the_same_way_again(copied, finished):
    config = copied("--run.resume=2", "--checkpoint.every=1", "--checkpoint.keep=3")
    folder = Path(config.run.folder)
    execute(config, progress=Progress.silent())
    assert list(saved_steps(folder / "checkpoints")) == [2, 3, 4]
    for name in LEARNED:
        assert series(folder, name) == series(finished, name), name


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_in_the_newest_checkpoint_ends_auto_and_the_one_before_is_used_when_asked(
    copied, finished
):
    config = copied()
    folder = Path(config.run.folder)
    broken = folder / "checkpoints" / "step-000004"
    flip(broken / "__0_0.distcp")
    with pytest.raises(UserError, match=r"__0_0\.distcp was changed.*step-000004; --run\.resume=2 goes on"):
        execute(config, progress=Progress.silent())
    assert list(saved_steps(folder / "checkpoints")) == [2, 4]
    execute(replace(config, run=replace(config.run, resume=2)), progress=Progress.silent())
    assert series(folder, "train/loss") == series(finished, "train/loss")
    execute(config, progress=Progress.silent())  # step 4 was saved anew


def test_a_refused_resume_changes_no_file_of_the_run(copied):
    config = copied()
    folder = Path(config.run.folder)
    (folder / "checkpoints" / "step-000004" / ".metadata").unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"\.metadata is missing"):
        execute(config, progress=Progress.silent())
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_half_written_checkpoint_is_passed_over_and_gone_after_the_next_save(copied):
    config = copied("--run.steps=5")
    checkpoints = Path(config.run.folder) / "checkpoints"
    shutil.copytree(checkpoints / "step-000004", checkpoints / ".step-000009.writing")
    execute(config, progress=Progress.silent())
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000004", "step-000005"]


def test_the_best_checkpoint_stays_also_over_a_resume(copied):
    """Reward is measured in every step; the best of four is known from metrics.jsonl alone."""
    config = copied("--checkpoint.best=rollout/reward_mean", "--run.resume=2", "--checkpoint.keep=1",
                    "--checkpoint.every=1", "--run.steps=6")  # fmt: skip
    execute(config, progress=Progress.silent())
    rewards = series(Path(config.run.folder), "rollout/reward_mean")
    best = max(rewards, key=lambda step: (rewards[step], -step))
    expected = sorted({max(best, 2), 6})  # there is no checkpoint of step 1
    assert list(saved_steps(Path(config.run.folder) / "checkpoints")) == expected


def test_a_disk_that_fills_up_ends_the_run_in_one_line_and_it_resumes_when_there_is_room(
    disk: Disk, small_run, copied, finished
):
    config = small_run("--checkpoint.recorded_steps=0")
    config = replace(config, run=replace(config.run, folder=str(disk.path / "run")))
    checkpoint = sum(file.stat().st_size for file in (finished / "checkpoints" / "step-000002").iterdir())
    disk.leave(checkpoint * 3 // 2)
    with pytest.raises(MachineError, match=r"checkpoint-write.*MiB free\); .*step-000004") as caught:
        execute(config, progress=Progress.silent())
    assert "\n" not in str(caught.value)
    assert list(saved_steps(disk.path / "run" / "checkpoints")) == [2]
    disk.leave(checkpoint * 3)
    execute(replace(config, run=replace(config.run, resume="auto")), progress=Progress.silent())
    assert series(disk.path / "run", "train/loss") == series(finished, "train/loss")
