"""A run from a validated config to its summary, in one process or on Ray."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from onroute.algorithms.bootstrap import Interval, bootstrap_difference
from onroute.core.config.sections import RunConfig
from onroute.core.engine import Engine
from onroute.core.environment import Environment
from onroute.core.errors import UserError
from onroute.core.samples import Group
from onroute.core.seeds import seed_for
from onroute.engines.catalog import ENGINES
from onroute.models.world import World, open_world
from onroute.observability.plots import plot_run
from onroute.observability.progress import Progress
from onroute.orchestration.drive import drive
from onroute.orchestration.driver import Outcome, Parts
from onroute.orchestration.environments import build_environment
from onroute.orchestration.folder import RunFolder
from onroute.orchestration.intake import open_intake
from onroute.orchestration.local import LocalRollouts, LocalTrainer
from onroute.orchestration.resume import find_resumption
from onroute.training.trainer import Trainer
from onroute.weights.local import LocalExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run came to.

    accuracy: sampled held-out accuracy with its 95 % interval, by stage: before,
        after_supervised, after.
    lift: gain of the RL phase alone, paired by problem; None for a resumed run.
    seconds: by phase, and in all.
    last_metrics: of the last step.
    """

    run: str
    accuracy: Mapping[str, Interval]
    lift: Interval | None
    seconds: Mapping[str, float]
    last_metrics: Mapping[str, float]
    plots: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    trainer: LocalTrainer
    engine: Engine
    environment: Environment


def execute(config: RunConfig, *, progress: Progress) -> RunSummary:
    """Run to the end and write the run folder.

    Raises UserError, CheckError or MachineError with the first cause; KeyboardInterrupt after an
    interrupt, with a checkpoint of the finished steps in the folder.
    """
    folder = RunFolder(Path(config.run.folder))
    if config.run.resume == "never":
        folder.require_free()
    find_resumption(folder, config)  # tells of its mistakes before anything is built
    with progress:
        if config.run.on == "ray":
            outcome = _ray().run_on_ray(config, folder, progress=progress)
        else:
            outcome = _run_here(config, folder, progress=progress)
    summary = _summarise(config, folder, outcome)
    folder.write(folder.summary, json.dumps(asdict(summary), indent=1))
    return summary


def _ray() -> ModuleType:
    """Ray is an extra: nothing else of the package needs it."""
    try:
        return importlib.import_module("onroute.orchestration.ray.run")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise UserError(
            "run-no-ray",
            "the package ray is not installed",
            'run.on = "ray"',
            'install onroute[ray], or set run.on = "local"',
        ) from error


def _run_here(config: RunConfig, folder: RunFolder, *, progress: Progress) -> Outcome:
    with open_world(timeout_s=config.parallel.timeout_s, threads=config.run.threads) as world:
        if world.size > 1:
            raise UserError(
                "run-ranks",
                f"{world.size} processes were started for a run in one process",
                "torchrun",
                "train from recorded rollouts by python -m onroute.training, or start it without torchrun",
            )
        built = _build(config, world)
        return asyncio.run(drive(config, folder, _open_local(config, built), progress=progress))


def _build(config: RunConfig, world: World) -> _Built:
    """Trainer, engine and environment of this process; the small and likely mistakes come first."""
    environment = build_environment(config)
    exchange = LocalExchange(config.engine.push_bucket_mib << 20)
    trainer = Trainer(config, world, total_steps=config.run.steps * config.data.optimizer_steps)
    engine = ENGINES[config.engine.name].load()(
        config.engine,
        config.model,
        capture=config.routing.replay == "rollout",
        exchange=exchange,
        device=world.device,
    )
    return _Built(trainer=LocalTrainer(trainer, config, exchange), engine=engine, environment=environment)


@asynccontextmanager
async def _open_local(config: RunConfig, built: _Built) -> AsyncIterator[Parts[Group]]:
    intake = await open_intake(config, built.engine)
    yield Parts(
        trainer=built.trainer,
        rollouts=LocalRollouts(built.environment, built.engine, intake),
        engine=built.engine,
        environment=built.environment,
    )


def _summarise(config: RunConfig, folder: RunFolder, outcome: Outcome) -> RunSummary:
    stages = {
        name: outcome.evaluations[name]
        for name in ("before", "after_supervised", "after")
        if name in outcome.evaluations
    }
    base = stages.get("after_supervised", stages.get("before"))
    lift = None
    if base is not None and "after" in stages:
        seed = seed_for(config.run.seed, "lift")
        lift = bootstrap_difference(stages["after"].accuracy, base.accuracy, seed=seed)
    return RunSummary(
        run=str(folder.path),
        accuracy={
            name: Interval(
                value=stage.metrics["eval/accuracy"],
                low=stage.metrics["eval/accuracy_low"],
                high=stage.metrics["eval/accuracy_high"],
            )
            for name, stage in stages.items()
        },
        lift=lift,
        seconds=outcome.seconds,
        last_metrics=outcome.last_metrics,
        plots=tuple(str(path) for path in plot_run(folder.path)) if config.tracking.plots else (),
    )
