"""One run in one process, from a validated config to its summary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from onroute.algorithms.bootstrap import Interval, bootstrap_difference
from onroute.core.config.load import dump_toml
from onroute.core.config.sections import RunConfig
from onroute.core.engine import Engine
from onroute.core.environment import Environment
from onroute.core.errors import UserError
from onroute.core.samples import Prompt
from onroute.core.seeds import seed_for
from onroute.engines.catalog import ENGINES
from onroute.environments.catalog import ENVIRONMENTS
from onroute.environments.codec import HuggingFaceCodec
from onroute.models.load import context_length, load_tokenizer, read_config, stop_token_ids
from onroute.models.world import World, open_world
from onroute.observability.metrics import Metrics, open_metrics
from onroute.observability.plots import plot_run
from onroute.observability.progress import Progress
from onroute.orchestration.driver import Outcome, Parts, SynchronousDriver
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
    resumption = find_resumption(folder, config)
    with open_world(timeout_s=config.parallel.timeout_s, threads=config.run.threads) as world:
        if world.size > 1:
            raise UserError(
                "run-ranks",
                f"{world.size} processes were started for a run in one process",
                "torchrun",
                "train from recorded rollouts by python -m onroute.training, or start it without torchrun",
            )
        built = _build(config, world)
        folder.create()
        folder.write(folder.config, dump_toml(config))
        kept = resumption.step if resumption is not None else None
        trackers = config.tracking.trackers
        with open_metrics(folder.path, trackers, resumed_from=kept) as metrics, progress:
            outcome = asyncio.run(_drive(config, built, folder, metrics=metrics, progress=progress))
    summary = _summarise(config, folder, outcome)
    folder.write(folder.summary, json.dumps(asdict(summary), indent=1))
    return summary


async def _drive(
    config: RunConfig, built: _Built, folder: RunFolder, *, metrics: Metrics, progress: Progress
) -> Outcome:
    rollouts = LocalRollouts(built.environment, built.engine, await open_intake(config, built.engine))
    parts = Parts(
        trainer=built.trainer, rollouts=rollouts, engine=built.engine, environment=built.environment
    )
    return await SynchronousDriver(config, parts, folder, metrics=metrics, progress=progress).run()


def _build(config: RunConfig, world: World) -> _Built:
    """Trainer, engine and environment of this process; the small and likely mistakes come first."""
    path = Path(config.model.path)
    limit = context_length(read_config(path))
    environment = build_environment(config)
    _require_room(environment.prompt("train", 0), config, limit)
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


def _require_room(prompt: Prompt, config: RunConfig, limit: int) -> None:
    """Raises UserError when a first prompt and its longest response do not fit the model's context."""
    length, new = len(prompt.tokens), config.engine.max_new_tokens
    if length + new > limit:
        raise UserError(
            "run-context",
            f"a prompt of {length} tokens and a response of {new} exceed the context of {limit}",
            f"prompt {prompt.id}",
            "lower engine.max_new_tokens or choose shorter prompts",
        )


def build_environment(config: RunConfig) -> Environment:
    """The environment of the run, speaking the model's own tokens."""
    path = Path(config.model.path)
    tokenizer = load_tokenizer(path)
    entry = ENVIRONMENTS[config.environment.name]
    environment: Environment = entry.load()(
        entry.build_options(config.environment.options),
        codec=HuggingFaceCodec(tokenizer),
        stop_token_ids=stop_token_ids(path, tokenizer),
        held_out=config.run.eval_prompts,
        seed=config.run.seed,
    )
    return environment


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
