"""Handles in one process: the trainer's one rank and the engine live here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from onroute.core.batches import StepReport, TrainBatch
from onroute.core.config.sections import RunConfig
from onroute.core.engine import Engine
from onroute.core.environment import Environment
from onroute.core.samples import Group, Json, Prompt, Sample
from onroute.core.sampling import SamplingParams
from onroute.core.weights import WeightVersion
from onroute.data.batch import facts_of, flatten, whole_batch
from onroute.data.plan import plan_batch
from onroute.data.recorded import save_rollouts, step_folder
from onroute.orchestration.folder import SAMPLED_BY
from onroute.orchestration.handles import Rollout
from onroute.orchestration.intake import Intake
from onroute.orchestration.rollout import roll_out
from onroute.orchestration.together import together
from onroute.training.export import export_model
from onroute.training.trainer import Trainer
from onroute.weights.checksum import check_receipt
from onroute.weights.local import LocalExchange


class LocalRollouts:
    """A `RolloutHandle` around an environment and an engine in this process."""

    def __init__(self, environment: Environment, engine: Engine, intake: Intake) -> None:
        self._environment, self._engine, self._intake = environment, engine, intake

    async def rollout(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, n: int, sampling: SamplingParams
    ) -> list[Rollout[Group]]:
        groups = await together(
            roll_out(self._environment, prompt, self._engine, n=n, sampling=sampling, seed=seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        )
        self._intake.check(groups)
        return [Rollout(prompt_id=group.prompt.id, facts=facts_of(group), held=group) for group in groups]


class LocalTrainer:
    """A `TrainerHandle` around a `Trainer` in this process. Its methods do not yield while they
    compute, so an interrupt finds the trainer between steps and never inside one."""

    def __init__(self, trainer: Trainer, config: RunConfig, exchange: LocalExchange) -> None:
        self._trainer, self._config, self._exchange = trainer, config, exchange

    async def train(self, rollouts: Sequence[Rollout[Group]]) -> list[StepReport]:
        samples, numbers = flatten([rollout.held for rollout in rollouts])
        return self._trainer.train(self._batch(samples, numbers, steps=self._config.data.optimizer_steps))

    async def supervise(self, samples: Sequence[Sample]) -> StepReport:
        return self._trainer.supervise(self._batch(samples, list(range(len(samples))), steps=1))

    async def push(self, engines: Sequence[Engine], version: WeightVersion) -> Mapping[str, float]:
        begun = time.perf_counter()
        offer = self._exchange.publish(version, self._trainer.published.specs, self._trainer.weights)
        try:
            receipts = [await engine.update_weights(offer) for engine in engines]
            sent = self._exchange.finish(offer)
        finally:
            self._exchange.withdraw(offer)
        for number, receipt in enumerate(receipts):
            check_receipt(sent, receipt, engine=str(number))
        return {
            "push/bytes": float(sent.num_bytes),
            "push/tensors": float(sent.num_tensors),
            "push/seconds": time.perf_counter() - begun,
            "push/version": float(version),
        }

    async def record(self, folder: Path, step: int, rollouts: Sequence[Rollout[Group]]) -> None:
        export_model(self._trainer, Path(self._config.model.path), step_folder(folder, step) / SAMPLED_BY)
        save_rollouts(folder, step, [rollout.held for rollout in rollouts])

    async def save(self, folder: Path, facts: dict[str, Json]) -> None:
        self._trainer.save(folder, facts)

    async def load(self, folder: Path) -> dict[str, Json]:
        return self._trainer.load(folder)

    def _batch(self, samples: Sequence[Sample], numbers: Sequence[int], *, steps: int) -> TrainBatch:
        plan = plan_batch(
            [sample.num_tokens for sample in samples],
            numbers,
            ranks=1,
            steps=steps,
            layout=self._config.data.layout,
            microbatch_tokens=self._config.data.microbatch_tokens,
        )
        return whole_batch(samples, numbers, plan, rank=0)
