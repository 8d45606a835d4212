"""A run on Ray: the same driver, its parts in processes of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import ObjectRef
from ray.actor import ActorHandle

from onroute.core.config.sections import RunConfig
from onroute.core.environment import Environment
from onroute.core.errors import MachineError
from onroute.core.samples import Group
from onroute.observability.progress import Progress
from onroute.orchestration.checkpoints import saved_steps
from onroute.orchestration.drive import drive
from onroute.orchestration.driver import Outcome, Parts
from onroute.orchestration.environments import build_environment
from onroute.orchestration.folder import RunFolder
from onroute.orchestration.intake import open_intake
from onroute.orchestration.ray.calls import Call, Calls, Limit
from onroute.orchestration.ray.cluster import Cluster, Spot, open_cluster, physical_order
from onroute.orchestration.ray.engine import EngineActor, RayEngine
from onroute.orchestration.ray.ranks import StoreAddress, TrainerRank
from onroute.orchestration.ray.trainer import RayTrainer
from onroute.orchestration.ray.workers import BuildEnvironment, EnvironmentWorker, RayRollouts
from onroute.weights.rendezvous import choose

STARTING = "starting"


def run_on_ray(
    config: RunConfig, folder: RunFolder, *, progress: Progress, build: BuildEnvironment = build_environment
) -> Outcome:
    """Drive to the end. After the machine failed, begin again from the newest checkpoint, `run.restarts`
    times at most.

    build: makes the environment, here and in every worker, so it must be one that pickles.
    Raises UserError, CheckError or MachineError with the first cause; no actor is left in any case.
    """
    restarts = config.run.restarts
    for attempt in range(restarts):
        before = saved_steps(folder.checkpoints).keys()
        try:
            return _attempt(config, folder, progress, build)
        except MachineError as error:
            progress.note(str(error))
            progress.note(f"beginning again from the newest checkpoint (restart {attempt + 1} of {restarts})")
            # The step that the user asked for stays the one until a checkpoint comes after it.
            if not isinstance(config.run.resume, int) or saved_steps(folder.checkpoints).keys() != before:
                config = replace(config, run=replace(config.run, resume="auto"))
    return _attempt(config, folder, progress, build)


def _attempt(config: RunConfig, folder: RunFolder, progress: Progress, build: BuildEnvironment) -> Outcome:
    environment = build(config)  # before the cluster: it knows the small and likely mistakes
    with open_cluster(config) as cluster:
        progress.note(cluster.words)
        parts = _open_parts(config, folder, cluster, environment, build)
        return asyncio.run(drive(config, folder, parts, progress=progress))


@asynccontextmanager
async def _open_parts(
    config: RunConfig, folder: RunFolder, cluster: Cluster, environment: Environment, build: BuildEnvironment
) -> AsyncIterator[Parts[ObjectRef[Group]]]:
    """Actors in all their places, ready. The cluster ends them."""
    # The actors may run in another folder than this process.
    config = replace(config, model=replace(config.model, path=str(Path(config.model.path).absolute())))
    limit = Limit(seconds=config.parallel.timeout_s, key="parallel.timeout_s")
    calls = Calls(folder.path)
    num_ranks, num_workers = config.parallel.ranks, config.environment.workers
    ranks = [cluster.create(TrainerRank, bundle, config) for bundle in range(num_ranks)]
    engine_actor = cluster.create(EngineActor, num_ranks, config, 0)
    workers = [
        cluster.create(EnvironmentWorker, num_ranks + 1 + number, config, engine_actor, build)
        for number in range(num_workers)
    ]
    everyone: list[ActorHandle[Any]] = [*ranks, engine_actor, *workers]
    for actor in everyone:
        calls.watch(actor.stay.remote())
    calls.enroll("engine 0", engine_actor)
    for number, worker in enumerate(workers):
        calls.enroll(f"environment worker {number}", worker)
    spots = await _spots(ranks, engine_actor, calls, limit)
    order = physical_order(spots[:num_ranks])
    ranks = [ranks[index] for index in order]
    for rank, trainer in enumerate(ranks):
        calls.enroll(f"trainer rank {rank}", trainer)
    await _start(ranks, engine_actor, workers, spots=[spots[order[0]], spots[-1]], calls=calls, limit=limit)
    engine = RayEngine(engine_actor, "engine 0", calls, limit)
    intake = await open_intake(config, engine)
    patience = Limit(seconds=config.environment.timeout_s, key="environment.timeout_s")
    yield Parts(
        trainer=RayTrainer(config, ranks, calls, limit),
        rollouts=RayRollouts(workers, intake, calls, patience),
        engine=engine,
        environment=environment,
    )


async def _spots(
    ranks: list[ActorHandle[TrainerRank]],
    engine: ActorHandle[EngineActor],
    calls: Calls,
    limit: Limit,
) -> list[Spot]:
    asked: list[Call[Spot]] = [Call("a trainer rank", actor.spot.remote()) for actor in ranks]
    return await calls.all([*asked, Call("engine 0", engine.spot.remote())], phase=STARTING, limit=limit)


async def _start(
    ranks: list[ActorHandle[TrainerRank]],
    engine: ActorHandle[EngineActor],
    workers: list[ActorHandle[EnvironmentWorker]],
    *,
    spots: list[Spot],
    calls: Calls,
    limit: Limit,
) -> None:
    """Build everything at the same time. spots: of rank 0 and the engine."""
    transport = choose(spots[0].node, [spots[1].node])
    opened: Call[StoreAddress] = Call("trainer rank 0", ranks[0].open_store.remote())
    address = await calls.one(opened, phase=STARTING, limit=limit)
    building: list[Call[Any]] = [
        Call(f"trainer rank {rank}", actor.start.remote(rank, len(ranks), address, transport))
        for rank, actor in enumerate(ranks)
    ]
    building.append(Call("engine 0", engine.start.remote(transport)))
    building += [
        Call(f"environment worker {number}", worker.start.remote()) for number, worker in enumerate(workers)
    ]
    await calls.all(building, phase=STARTING, limit=limit)
