"""Optimisation steps from recorded rollouts, on every rank that torchrun started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from onroute.core.batches import StepReport
from onroute.core.config.sections import RunConfig
from onroute.core.errors import UserError
from onroute.core.samples import Group
from onroute.data.batch import flatten, whole_batch
from onroute.data.intake import RouteShape, check_rollouts
from onroute.data.plan import plan_batch
from onroute.data.recorded import load_rollouts, recorded_steps, step_folder
from onroute.models.load import context_length
from onroute.models.world import World
from onroute.training.trainer import Trainer


def load_batches(folder: Path) -> list[list[Group]]:
    """The recorded steps in `folder`, in order. Raises UserError when there is none, and the loader's
    own errors for a damaged file."""
    steps = recorded_steps(folder)
    if not steps:
        raise UserError(
            "training-no-rollouts",
            "no recorded rollouts",
            str(folder),
            "give the rollouts folder of a run; checkpoint.recorded_steps says how many it keeps",
        )
    return [load_rollouts(step_folder(folder, step)) for step in steps]


def train_on(
    config: RunConfig,
    batches: Sequence[Sequence[Group]],
    world: World,
    *,
    report: Callable[[StepReport], None],
) -> Trainer:
    """Train one batch per recorded step; `report` is told of every optimizer step. A collective."""
    trainer = Trainer(config, world, total_steps=len(batches) * config.data.optimizer_steps)
    limit = context_length(trainer.model.config)
    shape = None
    if trainer.routes is not None:
        layers, num_experts, top_k = trainer.routes.map.signature
        shape = RouteShape(layers=layers, num_experts=num_experts, top_k=top_k)
    for batch in batches:
        check = partial(check_rollouts, batch, context_length=limit, routes=shape)
        world.together("checking rollouts", check)
        samples, numbers = flatten(batch)
        plan = plan_batch(
            [sample.num_tokens for sample in samples],
            numbers,
            ranks=world.size,
            steps=config.data.optimizer_steps,
            layout=config.data.layout,
            microbatch_tokens=config.data.microbatch_tokens,
        )
        for step in trainer.train(whole_batch(samples, numbers, plan, world.rank)):
            report(step)
    return trainer
