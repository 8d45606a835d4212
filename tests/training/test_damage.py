"""Every changed, shortened or missing file of a checkpoint is named before anything changes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onroute.core.errors import UserError
from onroute.models.world import World
from onroute.training.trainer import Trainer
from tests.ranks import run_world
from tests.training.builders import assert_same, batch_for, make_samples, parameters_of, run_config

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "complete.json")


def flip(path: Path, share: float) -> None:
    """One bit, at a place given as a share of the file."""
    content = bytearray(path.read_bytes())
    content[min(int(share * len(content)), len(content) - 1)] ^= 4
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "bit flip at the begin": lambda path: flip(path, 0),
    "bit flip within": lambda path: flip(path, 0.6),
    "bit flip at the end": lambda path: flip(path, 1),
    "last byte lost": lambda path: path.write_bytes(path.read_bytes()[:-1]) and None,
    "emptied": lambda path: path.write_bytes(b"") and None,
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b" ") and None,
    "deleted": Path.unlink,
    "a folder instead": lambda path: (path.unlink(), path.mkdir())[1],
}


def save_after_a_step(world: World, path: Path, folder: Path) -> None:
    config = run_config(path)
    trainer = Trainer(config, world, total_steps=2)
    trainer.train(batch_for(config, make_samples(), world))
    trainer.save(folder, {"cursor": 5})


@pytest.fixture(scope="module")
def checkpoint(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    run_world(2, save_after_a_step, moe, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    return folder


@pytest.fixture(scope="module")
def trainer(moe: Path, world: World) -> Trainer:
    """Never stepped; no refused load may move it."""
    return Trainer(run_config(moe), world, total_steps=2)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_damage_to_any_file_is_named_and_nothing_is_loaded(
    checkpoint: Path, trainer: Trainer, tmp_path: Path, file: str, damage: str
):
    folder = tmp_path / "step-1"
    shutil.copytree(checkpoint, folder)
    DAMAGE[damage](folder / file)
    before, random_state = parameters_of(trainer.model), torch.get_rng_state()
    with pytest.raises(UserError) as caught:
        trainer.load(folder)
    message = str(caught.value)
    # one bit of the marker may be the one in its schema number
    assert caught.value.code == "checkpoint-damaged" or "checkpoint schema" in message
    assert file in message or "checkpoint schema" in message
    assert str(folder) in message
    assert "\n" not in message
    assert_same(parameters_of(trainer.model), before)
    assert not any(bool(v.any()) for state in trainer._optimizer.state.values() for v in state.values())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_every_single_byte_of_the_marker_counts(checkpoint: Path, trainer: Trainer, tmp_path: Path):
    folder = tmp_path / "step-1"
    shutil.copytree(checkpoint, folder)
    marker = folder / "complete.json"
    whole = marker.read_bytes()
    assert json.loads(whole)["facts"]["cursor"] == 5
    for place in range(0, len(whole), 7):
        marker.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"checkpoint-damaged|checkpoint-schema"):
            trainer.load(folder)
    marker.write_bytes(whole)
    assert trainer.load(folder) == {"cursor": 5}


def refused_with(world: World, path: Path, views: tuple[Path, Path]) -> tuple[str, float, bool]:
    """Load, each rank from its own view of the disk: message, seconds, whether the weights stayed."""
    trainer = Trainer(run_config(path), world, total_steps=2)
    before = parameters_of(trainer.model)
    begun = time.monotonic()
    with pytest.raises(UserError) as caught:
        trainer.load(views[world.rank])
    seconds = time.monotonic() - begun
    after = parameters_of(trainer.model)
    return str(caught.value), seconds, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("complete.json", "deleted"),
        (".metadata", "bit flip within"),
        ("__0_0.distcp", "last byte lost"),
        ("__1_0.distcp", "bit flip within"),
    ],
)
def test_damage_that_only_the_second_rank_sees_ends_both_in_time(
    moe: Path, checkpoint: Path, tmp_path: Path, file: str, damage: str
):
    broken = tmp_path / "step-1"
    shutil.copytree(checkpoint, broken)
    DAMAGE[damage](broken / file)
    for message, seconds, stayed in run_world(2, refused_with, moe, (checkpoint, broken)):
        assert file in message
        assert "(rank 1)" in message
        assert seconds < 30
        assert stayed
