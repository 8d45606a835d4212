"""kill -9 in the middle of a save: the next start finds a whole checkpoint and goes on from it."""

from __future__ import annotations

import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from onroute.models.world import World, open_world
from onroute.orchestration.checkpoints import saved_steps
from onroute.training.trainer import Trainer
from tests.ranks import _SERVER
from tests.training.builders import batch_for, make_samples, parameters_of, run_config

DEADLINE_S = 60.0
KILLS = 6


def train_for_ever(path: Path, folder: Path) -> None:
    """Go on from the newest checkpoint; a step, then a save of it and once more of the same step."""
    with open_world(timeout_s=DEADLINE_S) as world:
        config = run_config(path)
        trainer = Trainer(config, world, total_steps=1000)
        saved = saved_steps(folder)
        step = max(saved, default=0)
        if saved:
            assert trainer.load(saved[step]) == {"step": step}
        while True:
            step += 1
            trainer.train(batch_for(config, make_samples(seed=step), world))
            for _ in range(2):
                trainer.save(folder / f"step-{step:06d}", {"step": step})


def kill_in_a_save(process: ForkServerProcess, folder: Path, before: int, delay_s: float) -> None:
    """Wait until it has saved a new step and is writing another, then a moment more."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end and process.is_alive():
        writing = folder.is_dir() and any(path.name.endswith(".writing") for path in folder.iterdir())
        if writing and max(saved_steps(folder), default=0) > before:
            break
        time.sleep(0.001)
    assert process.is_alive()
    time.sleep(delay_s)
    process.kill()
    process.join()


def test_a_run_killed_in_saves_goes_on_each_time(moe: Path, world: World, tmp_path: Path):
    folder = tmp_path / "checkpoints"
    moments = random.Random(5)
    reached = 0
    for _ in range(KILLS):
        process = _SERVER.Process(target=train_for_ever, args=(moe, folder), daemon=True)
        process.start()
        try:
            kill_in_a_save(process, folder, reached, moments.uniform(0, 0.08))
        finally:
            process.kill()
        saved = saved_steps(folder)
        assert max(saved) > reached
        reached = max(saved)
    config = run_config(moe)
    resumed = Trainer(config, world, total_steps=1000)
    assert resumed.load(saved_steps(folder)[reached]) == {"step": reached}
    unbroken = Trainer(config, world, total_steps=1000)
    for step in range(1, reached + 1):
        unbroken.train(batch_for(config, make_samples(seed=step), world))
    for name, value in parameters_of(unbroken.model).items():
        assert value.equal(parameters_of(resumed.model)[name]), name
    resumed.save(folder / f"step-{reached + 1:06d}", {"step": reached + 1})
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
