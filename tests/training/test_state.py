"""A run goes on from its checkpoint bit for bit, and a checkpoint that can't be used changes nothing."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from onroute.core.batches import StepReport
from onroute.core.config.sections import RunConfig
from onroute.core.errors import CheckError, MachineError, UserError
from onroute.models.world import World
from onroute.training.marker import MARKER, Marker, measure, write_marker
from onroute.training.trainer import Trainer
from tests.ranks import run_world
from tests.training.builders import assert_same, batch_for, make_samples, parameters_of, run_config, whole
from tests.training.conftest import FolderOf

Losses = list[float]


def config_of(path: Path) -> RunConfig:
    """A rate that depends on the step, so that a resumed run must know where it is."""
    return run_config(
        path, optimizer={"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01, "lr": 1e-2}
    )


def new_trainer(path: Path, world: World) -> Trainer:
    return Trainer(config_of(path), world, total_steps=6)


def steps(trainer: Trainer, world: World, seeds: range) -> Losses:
    """The batch of a step depends on its number alone."""
    reports = [trainer.train(batch_for(trainer._config, make_samples(seed=seed), world))[0] for seed in seeds]
    return [value for r in reports for value in (r.metrics["train/loss"], r.metrics["train/lr"])]


def moments_of(trainer: Trainer) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    return {
        f"{names[parameter]}.{kind}": whole(value)
        for parameter, state in trainer._optimizer.state.items()
        for kind, value in state.items()
    }


def save_halfway(
    world: World, path: Path, folder: Path
) -> tuple[Losses, dict[str, Tensor], dict[str, Tensor]]:
    """Six steps and a save after three: losses of the last three, parameters, moments when saved."""
    trainer = new_trainer(path, world)
    steps(trainer, world, range(3))
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)  # whoever saves need not have cleared them
    trainer.save(folder, {"note": "kept"})
    moments = moments_of(trainer)
    return steps(trainer, world, range(3, 6)), parameters_of(trainer.model), moments


def go_on(world: World, path: Path, folder: Path) -> tuple[Losses, dict[str, Tensor], dict[str, Tensor]]:
    """The same three steps after a load."""
    trainer = new_trainer(path, world)
    assert trainer.load(folder) == {"note": "kept"}
    moments = moments_of(trainer)
    return steps(trainer, world, range(3, 6)), parameters_of(trainer.model), moments


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_in_new_processes_as_if_it_had_not_stopped(moe: Path, tmp_path: Path, ranks: int):
    folder = tmp_path / "step-3"
    saved = run_world(ranks, save_halfway, moe, folder)
    resumed = run_world(ranks, go_on, moe, folder)
    for (losses, parameters, moments), (new_losses, new_parameters, new_moments) in zip(
        saved, resumed, strict=True
    ):
        assert losses == new_losses
        assert_same(parameters, new_parameters)
        assert_same(moments, new_moments)
        assert all(bool(moment.any()) for moment in new_moments.values())


@pytest.mark.parametrize(("before", "others"), [(1, (2,)), (2, (1, 4))])
def test_a_checkpoint_goes_on_with_fewer_ranks_or_more(
    moe: Path, tmp_path: Path, before: int, others: tuple[int, ...]
):
    folder = tmp_path / "step-3"
    losses, parameters, moments = run_world(before, save_halfway, moe, folder)[0]
    for after in others:
        for new_losses, new_parameters, new_moments in run_world(after, go_on, moe, folder):
            assert_same(new_moments, moments)
            assert new_losses == pytest.approx(losses, rel=0, abs=1e-5)
            for name, value in parameters.items():
                torch.testing.assert_close(new_parameters[name], value, rtol=0, atol=1e-4)


def test_saving_before_the_first_step_changes_nothing(moe: Path, world: World, tmp_path: Path):
    saving, silent = new_trainer(moe, world), new_trainer(moe, world)
    saving.save(tmp_path / "step-0", {})
    resumed = new_trainer(moe, world)
    resumed.load(tmp_path / "step-0")
    losses = [steps(trainer, world, range(2)) for trainer in (saving, silent, resumed)]
    assert losses[0] == losses[1] == losses[2]
    assert_same(moments_of(saving), moments_of(silent))
    assert_same(parameters_of(saving.model), parameters_of(silent.model))
    assert_same(parameters_of(resumed.model), parameters_of(silent.model))


def test_the_random_state_comes_back(moe: Path, world: World, tmp_path: Path):
    trainer = new_trainer(moe, world)
    torch.manual_seed(11)
    trainer.save(tmp_path / "step-1", {})
    drawn = torch.rand(3)
    torch.manual_seed(12)
    trainer.load(tmp_path / "step-1")
    assert torch.equal(torch.rand(3), drawn)


def test_steps_that_were_skipped_in_a_row_are_still_counted_after_a_resume(
    moe: Path, world: World, tmp_path: Path
):
    """Two were not finite before the save, the limit is three: one more ends the run."""
    trainer, resumed = new_trainer(moe, world), new_trainer(moe, world)
    trainer._skipped_in_a_row = 2
    trainer.save(tmp_path / "step-1", {})
    resumed.load(tmp_path / "step-1")
    with pytest.raises(CheckError, match="in 3 steps in a row"):
        resumed._count_skipped(StepReport(stepped=False, metrics={}))


def test_facts_come_back_as_they_were(moe: Path, world: World, tmp_path: Path):
    facts = {"cursor": 7, "name": "é", "nested": {"list": [1, 2.5, None, True]}}
    new_trainer(moe, world).save(tmp_path / "step-1", facts)
    assert new_trainer(moe, world).load(tmp_path / "step-1") == facts


@pytest.fixture(scope="module")
def checkpoint(moe: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After two steps. Not to be changed."""
    trainer = new_trainer(moe, world)
    steps(trainer, world, range(2))
    folder = tmp_path_factory.mktemp("saved") / "step-2"
    trainer.save(folder, {})
    return folder


def data_file(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change_marker(folder: Path, **changes: object) -> None:
    path = folder / MARKER
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def relist(folder: Path) -> None:
    """Make the marker agree with the files, as someone who forges a checkpoint would."""
    files = {path.name: measure(path) for path in folder.iterdir() if path.name != MARKER}
    write_marker(folder, Marker(ranks=1, files=files, facts={}))


class Bomb:
    def __init__(self, function: Callable[..., object], argument: str) -> None:
        self._call = (function, (argument,))

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return self._call


def plant(folder: Path, function: Callable[..., object], argument: str) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(function, argument)))
    relist(folder)


def scramble(folder: Path) -> None:
    path = data_file(folder)
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no complete checkpoint: complete.json is missing"),
    "no marker": (lambda f: (f / "complete.json").unlink(), "no complete checkpoint"),
    "broken marker": (lambda f: cut(f / "complete.json"), "no complete checkpoint"),
    "marker of something else": (lambda f: (f / "complete.json").write_text("[1]"), "no complete checkpoint"),
    "data cut off": (lambda f: cut(data_file(f)), r"__0_0.distcp is \d+ bytes long and was saved with \d+"),
    "no data": (lambda f: data_file(f).unlink(), "__0_0.distcp is missing"),
    "no index": (lambda f: (f / ".metadata").unlink(), ".metadata is missing"),
    "index not listed and missing": (
        lambda f: ((f / ".metadata").unlink(), relist(f)), "the index .metadata is broken"
    ),
    "index cut off": (lambda f: (cut(f / ".metadata"), relist(f)), "the index .metadata is broken"),
    "index of something else": (
        lambda f: ((f / ".metadata").write_bytes(pickle.dumps([1, 2])), relist(f)), "holds something else"
    ),
    "another schema": (lambda f: change_marker(f, schema=99), "checkpoint schema 99, this release reads 2"),
    "forged facts": (lambda f: change_marker(f, facts={}), "complete.json was changed"),
    "index that calls the shell": (
        lambda f: plant(f, os.system, f"touch {f.parent}/burnt"), r"it names (posix|os)\.system"
    ),
    "index that evaluates": (
        lambda f: plant(f, eval, f"open({str(f.parent / 'burnt')!r}, 'w')"), r"it names builtins\.eval"
    ),
    "index that imports": (lambda f: plant(f, __import__, "antigravity"), r"it names builtins\.__import__"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_checkpoint_that_cannot_be_used_is_refused_by_name_and_changes_nothing(
    moe: Path, world: World, checkpoint: Path, tmp_path: Path, name: str
):
    damage, message = DAMAGE[name]
    folder = tmp_path / "step-2"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    trainer, untouched = new_trainer(moe, world), new_trainer(moe, world)
    random_state = torch.get_rng_state()
    with pytest.raises(UserError, match=message) as caught:
        trainer.load(folder)
    assert "step-2" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "burnt").exists()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same(parameters_of(trainer.model), parameters_of(untouched.model))
    assert steps(trainer, world, range(1)) == steps(untouched, world, range(1))
    assert_same(parameters_of(trainer.model), parameters_of(untouched.model))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("deepseek_v3", {}),
        ("qwen3_moe", {"num_hidden_layers": 2}),
        ("qwen3_moe", {"moe_intermediate_size": 16}),
    ],
    ids=["another family", "fewer layers", "narrower experts"],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    folder_of: FolderOf, world: World, checkpoint: Path, model_type: str, changes: dict[str, int]
):
    trainer = new_trainer(folder_of(model_type, **changes), world)
    before = parameters_of(trainer.model)
    with pytest.raises(UserError, match="checkpoint of another model"):
        trainer.load(checkpoint)
    assert_same(parameters_of(trainer.model), before)


def test_data_that_cannot_be_read_is_refused(moe: Path, world: World, checkpoint: Path, tmp_path: Path):
    folder = tmp_path / "step-2"
    shutil.copytree(checkpoint, folder)
    scramble(folder)
    relist(folder)
    with pytest.raises(UserError, match=r"its tensors can't be read.*step-2"):
        new_trainer(moe, world).load(folder)


def refused_on_all(world: World, path: Path, folder: Path) -> str:
    trainer = new_trainer(path, world)
    with pytest.raises(UserError) as caught:
        trainer.load(folder)
    return str(caught.value)


def test_two_ranks_refuse_a_damaged_checkpoint_together(moe: Path, checkpoint: Path, tmp_path: Path):
    folder = tmp_path / "step-2"
    shutil.copytree(checkpoint, folder)
    cut(data_file(folder))
    for message in run_world(2, refused_on_all, moe, folder):
        assert "bytes long and was saved with" in message


@pytest.mark.parametrize("place", ["same folder", "other folder"])
def test_a_save_that_fails_halfway_leaves_the_checkpoint_before_it(
    moe: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    trainer = new_trainer(moe, world)
    steps(trainer, world, range(1))
    kept = tmp_path / "step-1"
    trainer.save(kept, {"round": 1})
    parameters = parameters_of(trainer.model)
    steps(trainer, world, range(1, 2))
    target = kept if place == "same folder" else tmp_path / "step-2"

    def fill_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(FileSystemWriter, "write_data", fill_disk)
        with pytest.raises(MachineError, match=r"checkpoint-write.*No space left on device") as caught:
            trainer.save(target, {"round": 2})
    assert "\n" not in str(caught.value)
    resumed = new_trainer(moe, world)
    assert resumed.load(kept) == {"round": 1}
    assert_same(parameters_of(resumed.model), parameters)
    trainer.save(target, {"round": 3})
    assert resumed.load(target) == {"round": 3}
    assert_same(parameters_of(resumed.model), parameters_of(trainer.model))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({kept.name, target.name})


def test_the_moments_are_those_of_all_parameters_and_finite(checkpoint: Path, moe: Path, world: World):
    trainer = new_trainer(moe, world)
    trainer.load(checkpoint)
    moments = moments_of(trainer)
    assert len(moments) == 3 * len(list(trainer.model.parameters()))
    assert all(math.isfinite(float(m.abs().max())) for m in moments.values())
    assert {float(m) for name, m in moments.items() if name.endswith(".step")} == {2.0}
