"""Whole runs on Ray: two trainer ranks, an engine and two workers, each a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from onroute.cli.catalogs import CATALOGS
from onroute.core.config.load import dump_toml, load_config
from onroute.core.config.sections import RunConfig
from onroute.data.recorded import load_rollouts, recorded_steps, step_folder
from onroute.observability.progress import Progress
from onroute.orchestration.folder import numbered
from onroute.orchestration.ray import run as ray_run_module
from onroute.orchestration.run import execute
from tests.orchestration.conftest import QUICKSTART, SMALL, merged
from tests.orchestration.ray.conftest import on_ray
from tests.orchestration.test_run import LEARNED, series

pytestmark = pytest.mark.slow
WHOLE = ("--engine.dtype=float32", "--checkpoint.record_every=1")


@pytest.fixture(scope="module")
def whole(demo_model, machine, tmp_path_factory) -> RunConfig:
    """A run on two ranks and two workers that has reached its end."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    places = (f"--model.path={demo_model}", f"--run.folder={folder}", *on_ray(machine))
    config = load_config(QUICKSTART, merged(*SMALL, *WHOLE, *places), CATALOGS)
    execute(config, progress=Progress.silent())
    return config


def test_a_run_on_ray_learns_what_a_local_one_does(whole, small_run, machine):
    local = small_run(*WHOLE)
    execute(local, progress=Progress.silent())
    a, b = Path(local.run.folder), Path(whole.run.folder)
    assert series(a, "rollout/reward_mean") == series(b, "rollout/reward_mean")
    assert any(series(a, "train/grad_norm").values())
    for name in ("train/loss", "train/grad_norm", "supervised/loss", "mismatch/k3"):
        assert list(series(b, name)) == list(series(a, name)), name
        assert series(b, name) == pytest.approx(series(a, name), abs=1e-5), name
    assert all(share == 1.0 for share in series(b, "routing/replayed_share").values())
    assert recorded_steps(b / "rollouts") == [3, 4]
    recorded = [load_rollouts(step_folder(folder / "rollouts", 3)) for folder in (a, b)]
    samples = [[sample for group in groups for sample in group.samples] for groups in recorded]
    for ours, theirs in zip(*samples, strict=True):
        assert ours.id == theirs.id
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.reward == theirs.reward
    assert list(numbered(b / "checkpoints")) == [2, 4]
    assert machine.is_empty()


def test_a_second_run_with_the_seed_is_the_same_bitwise_though_resumed_and_pushed_by_broadcast(
    whole, ray_run, monkeypatch
):
    halves = ray_run(*WHOLE, "--run.steps=2")
    execute(halves, progress=Progress.silent())
    monkeypatch.setattr(ray_run_module, "choose", lambda *hosts: "broadcast")
    execute(ray_run(*WHOLE, "--run.resume=auto"), progress=Progress.silent())
    for name in LEARNED:
        a, b = (series(Path(config.run.folder), name) for config in (whole, halves))
        assert a == b, name
        assert list(a) == [1, 2, 3, 4], name


@pytest.mark.parametrize(
    "overrides",
    [
        ("--data.prompts_per_step=1", "--data.samples_per_prompt=3"),
        ("--data.optimizer_steps=2", "--data.layout=packed"),
        ("--parallel.ranks=1", "--environment.workers=1", "--run.supervised_steps=0"),
    ],
    ids=["fewer groups than ranks", "two steps, packed", "one of each"],
)
def test_every_way_to_run_on_ray_reaches_its_last_step(ray_run, overrides):
    config = ray_run("--run.steps=2", "--run.eval_prompts=1", *overrides)
    execute(config, progress=Progress.silent())
    assert list(series(Path(config.run.folder), "train/loss")) == [1, 2]


def test_a_run_with_its_own_cluster_saves_when_it_is_ended_and_takes_the_cluster_along(small_run, tmp_path):
    config = small_run(
        "--run.on=ray", "--run.steps=4000", "--parallel.ranks=1", "--environment.workers=1",
        "--checkpoint.every=0", "--checkpoint.record_every=4000",
    )  # fmt: skip
    run_file = tmp_path / "run.toml"
    run_file.write_text(dump_toml(config))
    command = [sys.executable, "-c", "from onroute.cli.main import main; main()", "train", str(run_file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    folder = Path(config.run.folder)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None and not has_step(folder, 3):
        time.sleep(0.1)
    assert has_step(folder, 3)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    done = max(series(folder, "train/loss"))
    assert list(numbered(folder / "checkpoints")) == [done]
    assert in_session(process.pid) == []


def has_step(folder: Path, step: int) -> bool:
    return (folder / "metrics.jsonl").exists() and step in series(folder, "train/loss")


def in_session(session: int) -> list[str]:
    """Command lines of the processes of a session, a few seconds after its leader is gone."""
    deadline = time.monotonic() + 10
    left = ["unknown"]
    while left and time.monotonic() < deadline:
        left = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):
                if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    left.append((folder / "cmdline").read_text())
        time.sleep(0.1)
    return left
