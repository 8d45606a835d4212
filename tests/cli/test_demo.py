"""The commands as a user runs them, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onroute.cli.demo import _with_own_folders
from onroute.models.tiny import tiny_model

SHORT = (
    "--run.steps=2",
    "--optimizer.warmup_steps=1",
    "--run.supervised_steps=2",
    "--run.eval_every=0",
    "--run.eval_prompts=4",
    "--data.prompts_per_step=4",
)


def onroute(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from onroute.cli.main import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    place = tmp_path_factory.mktemp("demo")
    return place, onroute("demo", "--json", *SHORT, cwd=place)


def test_the_demo_ends_with_one_json_line(demo):
    place, done = demo
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["accuracy"]) == {"before", "after_warmup", "after_rl"}
    assert set(result["k3"]) == {"native", "replay"}
    assert set(result["seconds"]) == {"warmup", "rl", "total"}
    assert 0.5 < result["agreement"] <= 1.0
    assert (place / result["run"] / "plots" / "compare.png").is_file()


def test_compare_and_check_take_what_the_demo_left(demo):
    place, _ = demo
    compared = onroute("compare", "runs/demo", "--json", cwd=place)
    assert compared.returncode == 0, compared.stderr
    result = json.loads(compared.stdout.splitlines()[-1])
    assert result["steps"] == [1, 2]
    assert (result["layers"], len(result["agreement"])) == ([0, 1, 2], 3)
    assert result["replay"]["tokens"] == result["native"]["tokens"] == result["tokens"]

    checked = onroute("check", "runs/demo-model", "--json", cwd=place)
    assert checked.returncode == 0, checked.stderr
    model = json.loads(checked.stdout.splitlines()[-1])
    assert model["replay"] == "ok"
    assert model["moe_layers"] == [0, 1, 2]
    assert len(model["checks"]) == 5
    assert all(model["checks"].values())


def test_tables_are_for_people_and_fit_a_terminal(demo):
    place, _ = demo
    done = onroute("compare", "runs/demo", cwd=place)
    assert "native / replay" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("picture"))


def test_a_dense_model_is_a_result_of_check_with_exit_code_3(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "dense")
    done = onroute("check", "dense", "--json", cwd=tmp_path)
    assert done.returncode == 3
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["replay"] == "refused"
    assert "dense" in result["reason"]


def test_a_failure_is_a_json_object_too(tmp_path):
    (tmp_path / "run.toml").write_text("[run]\nsteps = 0\n")
    done = onroute("train", "run.toml", "--json", cwd=tmp_path)
    assert done.returncode == 2
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["exit_code"] == 2
    assert len(result["errors"]) == len(done.stderr.splitlines()) > 1
    assert set(result["errors"][0]) == {"code", "what", "where", "fix"}


@pytest.mark.parametrize("command", ["check", "compare"])
def test_a_wrong_path_is_one_line_and_exit_code_2(tmp_path, command):
    done = onroute(command, "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "nowhere" in line


def test_the_demo_never_writes_into_a_folder_that_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _with_own_folders([]) == ["--run.folder=runs/demo", "--model.path=runs/demo-model"]
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo-2-model").mkdir()
    assert _with_own_folders(["--run.seed=1"]) == [
        "--run.seed=1",
        "--run.folder=runs/demo-3",
        "--model.path=runs/demo-3-model",
    ]
    named = ["--run.folder=a", "--model.path=b"]
    assert dict(x.split("=") for x in _with_own_folders(named)) == {"--run.folder": "a", "--model.path": "b"}


@pytest.mark.slow
def test_the_demo_learns_and_replay_brings_trainer_and_engine_together(tmp_path):
    done = onroute("demo", "--json", "--run.seed=5", "--run.eval_every=0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["accuracy"]["before"] < 0.05
    assert result["lift"]["value"] >= 0.2
    assert result["lift"]["low"] >= 0.15
    assert result["k3"]["replay"] < result["k3"]["native"]
