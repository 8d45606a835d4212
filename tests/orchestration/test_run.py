"""Whole runs on the CPU: the real engine, trainer, environment and run folder."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from onroute.core.errors import CheckError, MachineError, UserError
from onroute.core.routing import RoutingTrace
from onroute.core.samples import Completion, Sample, SampleRequest
from onroute.data.recorded import load_rollouts, recorded_steps, step_folder
from onroute.engines.huggingface import HuggingFaceEngine
from onroute.observability.progress import Progress
from onroute.observability.trackers.jsonl import read_metrics
from onroute.orchestration import run as run_module
from onroute.orchestration.compare import compare_run
from onroute.orchestration.folder import SAMPLED_BY, RunFolder, numbered
from onroute.orchestration.local import LocalTrainer
from onroute.orchestration.run import execute


def series(folder: Path, name: str) -> dict[int, float]:
    return {
        row.step: row.values[name] for row in read_metrics(folder / "metrics.jsonl") if name in row.values
    }


LEARNED = ("train/loss", "train/grad_norm", "rollout/reward_mean", "mismatch/k3", "routing/agreement")


def test_a_run_leaves_a_folder_that_tells_all(small_run):
    config = small_run("--checkpoint.record_every=1", "--tracking.plots=true")
    summary = execute(config, progress=Progress.silent())
    folder = Path(config.run.folder)

    assert list(summary.accuracy) == ["before", "after_supervised", "after"]
    assert summary.lift is not None
    assert json.loads((folder / "summary.json").read_text())["run"] == str(folder)
    assert list(numbered(folder / "checkpoints")) == [2, 4]
    assert recorded_steps(folder / "rollouts") == [3, 4]
    assert (folder / "plots" / "reward.png").stat().st_size > 0
    for name in LEARNED:
        values = series(folder, name)
        assert list(values) == [1, 2, 3, 4], name
        assert all(math.isfinite(value) for value in values.values()), name
    # push 1 is the model as loaded, push 2 follows the supervised phase, then one a step
    assert series(folder, "push/version") == {1: 3, 2: 4, 3: 5, 4: 6}
    assert all(share == 1.0 for share in series(folder, "routing/replayed_share").values())


def test_recorded_rollouts_lie_beside_the_weights_that_sampled_them(small_run):
    config = small_run("--checkpoint.record_every=1", "--checkpoint.recorded_steps=4")
    execute(config, progress=Progress.silent())
    rollouts = Path(config.run.folder) / "rollouts"
    weights = [load_file(step_folder(rollouts, step) / SAMPLED_BY / "model.safetensors") for step in (1, 2)]
    versions = [
        load_rollouts(step_folder(rollouts, step))[0].samples[0].weight_versions.max() for step in (1, 2)
    ]

    assert versions == [2, 3]
    moved = [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
    assert "lm_head.weight" in moved


def test_a_resumed_run_equals_the_uninterrupted_one_bitwise(small_run):
    whole = small_run(folder="whole")
    execute(whole, progress=Progress.silent())
    # warm-up and schedule do not depend on the number of steps here, so two runs can share their first half
    execute(small_run("--run.steps=2", folder="halves"), progress=Progress.silent())
    halves = small_run("--run.resume=auto", folder="halves")
    execute(halves, progress=Progress.silent())

    assert any(series(Path(whole.run.folder), "train/grad_norm").values())
    for name in LEARNED:
        assert series(Path(whole.run.folder), name) == series(Path(halves.run.folder), name), name


def test_two_runs_with_one_seed_are_the_same_and_with_another_are_not(small_run):
    configs = [
        small_run(folder="a"),
        small_run(folder="b"),
        small_run("--run.seed=1", folder="c"),
    ]
    for config in configs:
        execute(config, progress=Progress.silent())
    a, b, c = (series(Path(config.run.folder), "train/loss") for config in configs)
    assert a == b
    assert a != c


def test_compare_scores_the_same_tokens_native_and_replayed(small_run):
    config = small_run()
    execute(config, progress=Progress.silent())
    result, picture = compare_run(config, RunFolder.open(Path(config.run.folder)))

    assert result.steps == (3, 4)
    assert result.num_sequences == 2 * 4 * 4
    assert result.layers == (0, 1, 2)
    assert all(0.5 < share <= 1.0 for share in result.agreement)
    assert result.replay["k3"] < 1e-2
    assert len(result.engine_log_probs) == len(result.native_log_probs) == int(result.native["tokens"])
    assert picture.stat().st_size > 0


def test_compare_with_an_engine_in_float32_finds_nothing_to_replay_away(small_run):
    config = small_run("--engine.dtype=float32")
    execute(config, progress=Progress.silent())
    result, _ = compare_run(config, RunFolder.open(Path(config.run.folder)))
    assert result.agreement == (1.0, 1.0, 1.0)
    assert result.native["log_prob_abs_diff_max"] < 1e-4
    assert result.replay["log_prob_abs_diff_max"] < 1e-4


@pytest.mark.parametrize(
    "overrides",
    [
        ("--data.layout=packed",),
        ("--model.activation_checkpointing=full",),
        ("--data.optimizer_steps=2",),
        ("--data.microbatch_tokens=64",),
        ("--algorithm.aggregation=sample_mean",),
        ("--routing.replay=off",),
        ("--engine.temperature=0.7",),
        ("--run.eval_prompts=0",),
        ("--run.supervised_steps=0",),
        ("--model.dtype=bfloat16", "--model.experts=grouped_mm"),
    ],
    ids=lambda overrides: overrides[0].removeprefix("--"),
)
def test_every_way_to_run_reaches_its_last_step(small_run, overrides):
    config = small_run("--run.steps=2", *overrides)
    execute(config, progress=Progress.silent())
    losses = series(Path(config.run.folder), "train/loss")
    assert list(losses) == [1, 2]
    assert all(math.isfinite(loss) for loss in losses.values())


def test_packed_and_padded_runs_learn_the_same(small_run):
    configs = [
        small_run("--engine.dtype=float32", f"--data.layout={kind}", folder=kind)
        for kind in ("rows", "packed")
    ]
    for config in configs:
        execute(config, progress=Progress.silent())
    rows, packed = (series(Path(config.run.folder), "train/loss") for config in configs)
    assert rows == pytest.approx(packed, abs=1e-5)


def test_a_folder_that_exists_is_refused_and_left_alone(small_run):
    config = small_run()
    folder = Path(config.run.folder)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"run-folder.*exists already.*run\.resume"):
        execute(config, progress=Progress.silent())
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_run_that_can_not_start_leaves_no_folder(small_run, tmp_path):
    config = small_run()
    config = replace(config, model=replace(config.model, path=str(tmp_path / "nothing")))
    with pytest.raises(UserError, match="model-missing"):
        execute(config, progress=Progress.silent())
    assert not Path(config.run.folder).exists()


def broken_parts(monkeypatch: pytest.MonkeyPatch, spoil) -> None:
    """Let the real parts be built, and `spoil` the environment's rollouts."""
    build = run_module._build

    def built(config, world):
        parts = build(config, world)
        rollout = parts.environment.rollout

        async def spoiled(prompt, sampler, **settings):
            group = await rollout(prompt, sampler, **settings)
            if prompt.id.split("/")[1] == "held_out":
                return group
            return replace(group, samples=tuple(map(spoil, group.samples)))

        monkeypatch.setattr(parts.environment, "rollout", spoiled)
        return parts

    monkeypatch.setattr(run_module, "_build", built)


def zero_routes(sample: Sample) -> Sample:
    trace = sample.routing
    assert trace is not None
    zeros = RoutingTrace(
        experts=np.zeros_like(trace.experts),
        layers=trace.layers,
        num_experts=trace.num_experts,
        valid=trace.valid,
    )
    return replace(sample, routing=zeros)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (zero_routes, r"routing-all-zero.*all-zero routes for 3/3 layers.*number_sorting/train"),
        (lambda s: replace(s, routing=None), r"routing-missing.*number_sorting/train"),
        (lambda s: replace(s, reward=math.nan), r"reward.*nan.*number_sorting/train"),
        (lambda s: replace(s, log_probs=s.log_probs[:-1]), r"data-length.*number_sorting/train"),
    ],
    ids=["all-zero routes", "no routes", "reward NaN", "short log-probs"],
)
def test_a_bad_sample_ends_the_run_before_any_optimizer_step(small_run, monkeypatch, spoil, message):
    broken_parts(monkeypatch, spoil)
    config = small_run()
    with pytest.raises(CheckError, match=message):
        execute(config, progress=Progress.silent())
    assert series(Path(config.run.folder), "train/loss") == {}
    assert not (Path(config.run.folder) / "checkpoints").exists()


def test_an_environment_that_raises_ends_the_run_in_one_line_with_its_traceback_in_a_file(
    small_run, monkeypatch
):
    def boom(sample: Sample) -> Sample:
        raise RuntimeError("the verifier fell over")

    broken_parts(monkeypatch, boom)
    with pytest.raises(
        MachineError,
        match=r"environment-failed.*RuntimeError: the verifier fell over.*prompt number_sorting/",
    ) as caught:
        execute(small_run(), progress=Progress.silent())
    assert "\n" not in str(caught.value)
    traceback = Path(caught.value.fix.rpartition(" ")[2]).read_text()
    assert "in boom" in traceback


def test_an_engine_that_raises_is_not_taken_for_the_environment(small_run, monkeypatch):
    async def fails(engine: HuggingFaceEngine, requests: Sequence[SampleRequest]) -> list[Completion]:
        raise ZeroDivisionError("in the engine")

    monkeypatch.setattr(HuggingFaceEngine, "sample", fails)
    with pytest.raises(ZeroDivisionError, match="in the engine"):
        execute(small_run(), progress=Progress.silent())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, also where the suite itself was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def compared(small_run, monkeypatch, target, method, call, error) -> tuple[Path, Path]:
    """A whole run, and one that `error` ends at a call of `target.method` and that is then resumed."""
    whole = small_run("--checkpoint.every=0", folder="whole")
    execute(whole, progress=Progress.silent())
    stock, count = getattr(target, method), 0

    async def interrupted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == call:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        return await stock(*args, **kwargs)

    monkeypatch.setattr(target, method, interrupted)
    config = small_run("--checkpoint.every=0", folder="halves")
    with pytest.raises(error):
        execute(config, progress=Progress.silent())
    monkeypatch.undo()
    assert numbered(Path(config.run.folder) / "checkpoints")
    execute(
        small_run("--checkpoint.every=0", "--run.resume=auto", folder="halves"), progress=Progress.silent()
    )
    return Path(whole.run.folder), Path(config.run.folder)


@pytest.mark.parametrize(
    ("target", "method", "call"),
    [
        (HuggingFaceEngine, "sample", 4 * (8 + 8) // 4 + 4 + 9),
        (LocalTrainer, "train", 3),
        (LocalTrainer, "push", 4),
        (LocalTrainer, "record", 1),
    ],
    ids=["generate", "train", "push", "record"],
)
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_and_resumed_run_equals_the_uninterrupted_one(
    small_run, monkeypatch, capfd, target, method, call
):
    whole, halves = compared(small_run, monkeypatch, target, method, call, KeyboardInterrupt)
    for name in (*LEARNED, "push/version"):
        assert series(whole, name) == series(halves, name), name
    assert "Traceback" not in capfd.readouterr().err


def test_two_runs_in_one_folder_are_one_too_many(small_run):
    config = small_run()
    folder = RunFolder(Path(config.run.folder))
    folder.create()
    with folder.locked(), pytest.raises(UserError, match=r"run-busy.*another process"):
        execute(small_run("--run.resume=auto"), progress=Progress.silent())


def test_a_resumed_run_still_knows_its_first_evaluations(small_run):
    execute(small_run("--run.steps=2"), progress=Progress.silent())
    summary = execute(small_run("--run.resume=auto"), progress=Progress.silent())
    assert list(summary.accuracy) == ["before", "after_supervised", "after"]
    assert summary.lift is not None


def test_a_prompt_that_fits_no_microbatch_is_refused_before_the_folder_is_made(small_run):
    config = small_run("--data.microbatch_tokens=10")
    with pytest.raises(UserError, match=r"run-microbatch.*at least 14"):
        execute(config, progress=Progress.silent())
    assert not Path(config.run.folder).exists()
