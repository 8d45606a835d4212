"""A disk that fills up during a save costs that save and nothing else."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

import pytest

from onroute.core.errors import MachineError
from onroute.models.world import World
from onroute.training.state import _unwritable
from onroute.training.trainer import Trainer
from tests.disk import PAGE, Disk
from tests.ranks import run_world
from tests.training.builders import assert_same, batch_for, make_samples, parameters_of, run_config


def pages(path: Path) -> int:
    return -(-path.stat().st_size // PAGE) * PAGE


def room(checkpoint: Path, until: str) -> int:
    """Bytes that let a save like `checkpoint` come as far as it says."""
    data, index, marker = (
        pages(checkpoint / name) for name in ("__0_0.distcp", ".metadata", "complete.json")
    )
    return {
        "nothing": 0,
        "the first page of the tensors": PAGE,
        "half of the tensors": data // 2 // PAGE * PAGE,
        "all tensors but a page": data - PAGE,
        "no index": data,
        "the index but a page": data + index - PAGE,
        "no marker": data + index,
        "the marker": data + index + marker,
    }[until]


STAGES = (
    "nothing",
    "the first page of the tensors",
    "half of the tensors",
    "all tensors but a page",
    "no index",
    "the index but a page",
    "no marker",
)


@pytest.fixture(scope="module")
def trainer(moe: Path, world: World) -> Trainer:
    config = run_config(moe)
    stepped = Trainer(config, world, total_steps=2)
    stepped.train(batch_for(config, make_samples(), world))
    return stepped


@pytest.mark.parametrize("target", ["step-000001", "step-000002"], ids=["same step", "next step"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_save_on_a_full_disk_is_one_line_and_the_checkpoint_before_it_loads(
    disk: Disk, trainer: Trainer, moe: Path, world: World, stage: str, target: str
):
    kept = disk.path / "checkpoints" / "step-000001"
    trainer.save(kept, {"save": 1})
    disk.leave(room(kept, stage))
    with pytest.raises(
        MachineError, match=r"checkpoint-write.*can't be written.*\(\d\.\d MiB free\)"
    ) as caught:
        trainer.save(kept.with_name(target), {"save": 2})
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    assert [path.name for path in kept.parent.iterdir()] == ["step-000001"]
    resumed = Trainer(run_config(moe), world, total_steps=2)
    assert resumed.load(kept) == {"save": 1}
    assert_same(parameters_of(resumed.model), parameters_of(trainer.model))


def test_the_same_save_succeeds_when_there_is_just_room(disk: Disk, trainer: Trainer):
    kept = disk.path / "checkpoints" / "step-000001"
    trainer.save(kept, {"save": 1})
    disk.leave(room(kept, "the marker"))
    trainer.save(kept.with_name("step-000002"), {"save": 2})
    assert sorted(path.name for path in kept.parent.iterdir()) == ["step-000001", "step-000002"]


def save_twice(world: World, path: Path, disk: Disk) -> str:
    trainer = Trainer(run_config(path), world, total_steps=2)
    kept = disk.path / "checkpoints" / "step-000001"
    trainer.save(kept, {"save": 1})
    world.together("test", lambda: disk.leave(40 * PAGE) if world.rank == 0 else None)
    with pytest.raises(MachineError) as caught:
        trainer.save(kept.with_name("step-000002"), {"save": 2})
    assert trainer.load(kept) == {"save": 1}
    return str(caught.value)


def test_two_ranks_tell_a_full_disk_together(disk: Disk, moe: Path):
    for message in run_world(2, save_twice, moe, disk):
        assert "can't be written" in message


def test_a_folder_that_another_rank_removes_meanwhile_is_still_told(tmp_path: Path):
    folder, done = tmp_path / "checkpoints" / "step-000002", Event()

    def come_and_go() -> None:
        while not done.is_set():
            folder.mkdir(parents=True)
            folder.rmdir()
            folder.parent.rmdir()

    other = Thread(target=come_and_go)
    other.start()
    try:
        told = {_unwritable(folder, "no room").what.partition(" (")[0] for _ in range(3000)}
    finally:
        done.set()
        other.join()
    assert told == {"the checkpoint can't be written: no room"}
