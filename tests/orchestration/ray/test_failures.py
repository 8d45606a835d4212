"""What fails on Ray: the first cause is told, nothing is left, and a restart goes on from a checkpoint."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from onroute.core.errors import MachineError, UserError
from onroute.observability.progress import Progress
from onroute.orchestration.folder import RunFolder, numbered
from onroute.orchestration.ray.run import run_on_ray
from onroute.orchestration.run import execute
from tests.orchestration.ray import environments
from tests.orchestration.test_run import series

pytestmark = pytest.mark.slow
ONE_OF_EACH = ("--parallel.ranks=1", "--environment.workers=1")


def drive(config, build, progress=None):
    folder = RunFolder(Path(config.run.folder))
    return run_on_ray(config, folder, progress=progress or Progress.silent(), build=build)


@pytest.mark.parametrize(
    ("kind", "role", "ranks"),
    [
        ("TrainerRank", "trainer rank [01]", 2),
        ("EngineActor", "engine 0", 1),
        ("EnvironmentWorker", "environment worker 0", 1),
    ],
)
def test_a_killed_actor_ends_the_run_with_its_name_and_nothing_is_left(ray_run, machine, kind, role, ranks):
    config = ray_run(*ONE_OF_EACH, f"--parallel.ranks={ranks}")
    killer = machine.kill_one(kind, config, after_save=2)
    with pytest.raises(MachineError, match=rf"ray-actor-died.*{role} \(process \d+\) died.*while ") as caught:
        drive(config, environments.slow)
    killer.join()
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)
    assert machine.is_empty()
    assert list(numbered(Path(config.run.folder) / "checkpoints")) == [2]


def test_with_a_restart_the_run_goes_on_from_its_checkpoint_to_its_end(ray_run, small_run, machine):
    config = ray_run(*ONE_OF_EACH, "--run.restarts=1")
    local = small_run(folder="local")
    text = io.StringIO()
    killer = machine.kill_one("TrainerRank", config, after_save=2)
    drive(config, environments.slow, Progress(Console(width=400, file=text), "plain"))
    killer.join()
    execute(local, progress=Progress.silent())
    assert "ray-actor-died" in text.getvalue()
    assert "restart 1 of 1" in text.getvalue()
    assert "resumed after step 2" in text.getvalue()
    a, b = (series(Path(c.run.folder), "train/loss") for c in (config, local))
    assert a == b  # bitwise, since a single rank computes what a local run does
    assert list(a) == [1, 2, 3, 4]
    assert machine.is_empty()


def test_an_environment_that_raises_ends_the_run_with_its_own_message(ray_run, machine):
    with pytest.raises(MachineError, match=r"environment-failed.*the verifier fell over.*prompt "):
        drive(ray_run(*ONE_OF_EACH), environments.raising)
    assert machine.is_empty()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (environments.waiting, r"environment-timeout.*not done after 3 s.*prompt number_sorting/train"),
        (
            environments.blocking,
            r"ray-timeout.*environment worker 0 within 8 s.*rolling out",
        ),
        (environments.dying, r"ray-actor-died.*environment worker 0 .*while rolling out"),
    ],
    ids=["waits for ever", "blocks its process", "ends its process"],
)
def test_an_environment_that_never_answers_ends_the_run_in_time(ray_run, machine, build, message):
    config = ray_run(
        *ONE_OF_EACH, "--environment.timeout_s=3", "--run.eval_prompts=0", "--run.supervised_steps=0"
    )
    with pytest.raises(MachineError, match=message):
        drive(config, build)
    assert machine.is_empty()


def test_a_cluster_that_is_too_small_says_what_was_asked_and_what_there_is(ray_run):
    config = ray_run("--parallel.ranks=64", "--parallel.placement_timeout_s=2")
    begun = time.monotonic()
    with pytest.raises(
        MachineError, match=r"ray-shortage.*asked: 64 trainer.*has 5 CPU .*on 1 node"
    ) as caught:
        execute(config, progress=Progress.silent())
    assert time.monotonic() - begun < 30
    assert caught.value.exit_code == 4
    assert not Path(config.run.folder).exists()


def test_a_cluster_that_is_not_there_is_told(ray_run):
    config = ray_run()
    config = replace(config, run=replace(config.run, ray_address="127.0.0.1:1"))
    with pytest.raises(MachineError, match=r"ray-connect.*127\.0\.0\.1:1"):
        execute(config, progress=Progress.silent())


def test_a_mistake_that_one_rank_finds_is_told_once_and_as_itself(ray_run, machine):
    config = ray_run("--data.layout=packed", "--model.attention=flash_attention_2")
    with pytest.raises(UserError):
        execute(config, progress=Progress.silent())
    assert not Path(config.run.folder).exists()
    assert machine.is_empty()
