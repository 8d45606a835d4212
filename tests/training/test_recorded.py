"""Training from recorded rollouts, in one process and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onroute.core.samples import Sample
from onroute.data.recorded import save_rollouts
from onroute.training.__main__ import main
from tests.training.builders import grouped, make_samples

RUN = """
[model]
path = "{model}"
dtype = "float32"
experts = "eager"
[engine]
max_new_tokens = 8
[environment]
name = "reasoning_gym"
options = {{ task = "number_sorting" }}
[data]
microbatch_tokens = 32
optimizer_steps = 2
[algorithm]
max_log_prob_gap = inf
[optimizer]
lr = 1e-3
[run]
folder = "{folder}"
"""


@pytest.fixture
def run_file(moe: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(model=moe, folder=tmp_path / "run"))
    return path


def record(folder: Path, batches: Sequence[Sequence[Sample]]) -> Path:
    for step, samples in enumerate(batches):
        save_rollouts(folder, step, grouped(samples))
    return folder


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recorded steps."""
    folder = tmp_path_factory.mktemp("rollouts")
    return record(folder, [make_samples(seed=seed) for seed in range(2)])


def numbers(lines: str) -> tuple[list[dict[str, float]], dict[str, object]]:
    *steps, last = map(json.loads, lines.splitlines())
    return steps, last


def test_one_process_and_two_ranks_print_the_same_losses(
    run_file: Path, rollouts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(run_file), "--rollouts", str(rollouts)]) == 0
    one, last = numbers(capsys.readouterr().out)
    assert last == {
        "optimizer_steps": 4, "ranks": 1, "checkpoint": str(tmp_path / "run/checkpoints/step-000002")
    }  # fmt: skip
    assert [step["step"] for step in one] == [1, 2, 3, 4]
    assert all(step["stepped"] for step in one)
    assert (tmp_path / "run/checkpoints/step-000002/complete.json").is_file()

    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launch, "-m", "onroute.training", str(run_file), "--rollouts", str(rollouts)]
    done = subprocess.run(
        [sys.executable, *command, f"--run.folder={tmp_path / 'two'}"],
        capture_output=True, text=True, timeout=90, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    two, last = numbers(done.stdout)
    assert (last["optimizer_steps"], last["ranks"]) == (4, 2)
    for found, expected in zip(two, one, strict=True):
        for name in (
            "train/loss",
            "train/grad_norm",
            "train/loss_tokens",
            "mismatch/k3",
            "routing/agreement",
        ):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_a_folder_without_rollouts_ends_with_one_line_and_exit_code_2(run_file: Path, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "onroute.training", str(run_file), "--rollouts", str(tmp_path / "none")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("[training-no-rollouts] no recorded rollouts;")
    assert str(tmp_path / "none") in line


def all_zero(sample: Sample) -> Sample:
    assert sample.routing is not None
    return replace(sample, routing=replace(sample.routing, experts=np.zeros_like(sample.routing.experts)))


BAD = {
    "routes of zeros": (all_zero, "[routing-all-zero] engine returned all-zero routes for 3/3 layers"),
    "no routes": (lambda s: replace(s, routing=None), "[routing-missing]"),
}


@pytest.mark.parametrize(("spoil", "words"), BAD.values(), ids=BAD)
def test_bad_rollouts_end_the_run_before_any_step(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil, words: str
):
    samples = make_samples()
    folder = record(tmp_path / "bad", [[*samples[:4], spoil(samples[4]), samples[5]]])
    assert main([str(run_file), "--rollouts", str(folder)]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "sample s4" in err
    assert not (tmp_path / "run/checkpoints").exists()


def test_an_unknown_key_is_the_users_to_mend(
    run_file: Path, rollouts: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(run_file), "--rollouts", str(rollouts), "--optimizer.learning=1"]) == 2
    assert "optimizer.learning" in capsys.readouterr().err


def test_a_step_that_is_not_finite_is_still_a_line_of_json(
    run_file: Path, rollouts: Path, capsys: pytest.CaptureFixture[str]
):
    # A learning rate that throws the weights out of range: what follows is not finite, and is skipped.
    arguments = [str(run_file), "--rollouts", str(rollouts), "--optimizer.lr=1e30"]
    code = main([*arguments, "--optimizer.max_nonfinite_steps=9"])
    lines = capsys.readouterr().out.splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    steps = [json.loads(line, parse_constant=refuse) for line in lines]
    assert code == 0
    assert any(step.get("train/skipped") for step in steps)
