"""One rank of the trainer: a sharded model, its optimizer, and the batches it learns from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from onroute.algorithms.advantages.base import Advantages
from onroute.algorithms.aggregation import sample_weights
from onroute.algorithms.catalog import ADVANTAGES, LOSSES
from onroute.algorithms.losses.base import Loss
from onroute.algorithms.losses.supervised import supervised
from onroute.core.batches import StepReport, TrainBatch
from onroute.core.config.sections import RunConfig
from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.core.samples import Json, Sample
from onroute.models import packing
from onroute.models.load import read_config
from onroute.models.names import PublishedLayout
from onroute.models.shard import load_sharded
from onroute.models.world import World
from onroute.routing.activation import enable_checkpointing
from onroute.routing.dense import refuse_dense
from onroute.routing.session import ReplaySession
from onroute.training.marker import damaged
from onroute.training.microbatch import Microbatch, assemble
from onroute.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from onroute.training.routes import TrainerRoutes
from onroute.training.scoring import score, under
from onroute.training.state import load_state, save_state
from onroute.training.step import StepInputs, optimizer_step


class Trainer:
    """Built and called alike on every rank; every method but `close` is a collective.

    config: the whole run; the trainer reads its model, routing, data, algorithm and optimizer.
    total_steps: optimizer steps of the run, which the learning rate's schedule ends with.

    Raises UserError when the model can't be read, is dense though replay is demanded, or can't be
    packed though packing is demanded; CheckError when replay can't be proved on it.
    """

    def __init__(self, config: RunConfig, world: World, *, total_steps: int) -> None:
        self.world = world
        self._config, self._total_steps = config, total_steps
        path = Path(config.model.path)
        if config.routing.replay != "off":
            world.together("reading the model's configuration", lambda: refuse_dense(read_config(path)))
        self.model: PreTrainedModel = load_sharded(
            path, config.model, world, reshard=config.parallel.reshard_after_forward
        )
        self.published = PublishedLayout(self.model)
        if config.data.layout == "packed":
            packing.require_packing(self.model, world.device, tolerance=packing.TOLERANCE[config.model.dtype])
        self.routes = (
            TrainerRoutes(self.model, world.device, records=config.routing.replay == "record")
            if config.routing.replay != "off"
            else None
        )
        if self.routes is not None and config.routing.start_check:
            self.routes.prove().require()
        if config.model.activation_checkpointing == "full":
            enable_checkpointing(self.model, self.routes.session.context_fn if self.routes else _no_contexts)
        self._optimizer = build_optimizer(self.model, config.optimizer, lr=config.optimizer.lr)
        self._supervised_optimizer: torch.optim.AdamW | None = None
        self._optimizer_steps = 0
        self._skipped_in_a_row = 0
        advantage, loss = ADVANTAGES[config.algorithm.advantage], LOSSES[config.algorithm.loss]
        self._advantage = advantage.load()
        self._advantage_options = advantage.build_options(config.algorithm.advantage_options)
        self._loss: Loss[object] = loss.load()
        self._loss_options = loss.build_options(config.algorithm.loss_options)
        self.model.train()

    def log_probs(self, batch: TrainBatch) -> list[Tensor]:
        """Log-probs [n] of the loss tokens of each of this rank's microbatches, step after step, under
        the current weights and the replayed route."""
        microbatches = [mb for step in self._lay_out(batch, self._advantages(batch)) for mb in step]
        with self._replaying(batch.samples):
            scored = self._score(microbatches)
            self._settle(recompute=False)
        return scored

    def train(self, batch: TrainBatch) -> list[StepReport]:
        """All optimizer steps of one batch.

        With several steps the old policy's log-probs are scored before the first one, and with
        `routing.replay = "record"` in any case, by the pass that records the routes to replay; else with
        one step the training pass itself yields the same numbers.

        Raises CheckError, on every rank and before the optimizer moves, when a sample brought no fitting
        routes, when replay fell short, when engine and trainer disagree beyond
        `algorithm.max_log_prob_gap`, or when too many steps in a row were not finite.
        """
        self._supervised_optimizer = None
        advantages = self._advantages(batch)
        steps = self._lay_out(batch, advantages)
        with self._replaying(batch.samples):
            old = self._old_log_probs(steps)
            reports = [self._step(*pair) for pair in zip(steps, old, strict=True)]
        first = reports[0]
        return [
            StepReport(stepped=first.stepped, metrics={**advantages.metrics, **first.metrics}),
            *reports[1:],
        ]

    def supervise(self, batch: TrainBatch) -> StepReport:
        """One optimizer step of supervised learning, on live routes, by an optimizer of its own that
        ends with the first batch of RL."""
        if self._supervised_optimizer is None:
            self._supervised_optimizer = build_optimizer(
                self.model, self._config.optimizer, lr=self._config.run.supervised_lr
            )
        (microbatches,) = self._lay_out(
            batch, Advantages(values=np.zeros(batch.plan.num_samples), metrics={})
        )
        return optimizer_step(
            StepInputs(
                microbatches=microbatches,
                old_log_probs=[None] * len(microbatches),
                temperature=1.0,
                clip_norm=self._config.optimizer.clip_norm,
                max_log_prob_gap=None,
                prefix="supervised",
            ),
            self.model, self._supervised_optimizer, self.world,
            loss=lambda inputs: supervised(inputs, None), settle=None, session=None,
        )  # fmt: skip

    def weights(self) -> Iterator[dict[str, Tensor]]:
        """Parameter by parameter, the full tensors under their published names."""
        return self.published.tensors()

    def save(self, folder: Path, facts: dict[str, Json]) -> None:
        """Write a checkpoint that `load` restores bitwise on the same layout."""
        save_state(
            folder,
            self.model,
            self._optimizer,
            self.world,
            {
                "trainer_steps": self._optimizer_steps,
                "trainer_skipped_in_a_row": self._skipped_in_a_row,
                **facts,
            },
        )

    def load(self, folder: Path) -> dict[str, Json]:
        """Restore a checkpoint; the facts saved with it. Raises UserError when it can't be used."""
        facts = load_state(folder, self.model, self._optimizer, self.world)
        steps, skipped = facts.pop("trainer_steps", None), facts.pop("trainer_skipped_in_a_row", None)
        if not isinstance(steps, int) or not isinstance(skipped, int):
            raise damaged(folder, f"the trainer's facts are steps {steps!r}, skipped in a row {skipped!r}")
        self._optimizer_steps, self._skipped_in_a_row = steps, skipped
        return facts

    def _old_log_probs(self, steps: Sequence[Sequence[Microbatch]]) -> list[list[Tensor | None]]:
        records = self.routes is not None and self.routes.records
        if len(steps) == 1 and not records:
            return [[None] * len(step) for step in steps]
        microbatches = [mb for step in steps for mb in step]
        scored = iter(self._record(microbatches) if records else self._score(microbatches))
        self._settle(recompute=False)
        return [[next(scored) for _ in step] for step in steps]

    def _record(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Log-probs on live routes, which are replayed from here on."""
        routes = self.routes
        assert routes is not None  # asked for by the caller
        traces: dict[int, RoutingTrace] = {}
        scored = score(
            self.model,
            microbatches,
            within=lambda _, microbatch: routes.recording(microbatch.batch.spans, traces),
            temperature=self._config.engine.temperature,
        )
        routes.session.load(traces)
        return scored

    def _advantages(self, batch: TrainBatch) -> Advantages:
        advantages: Advantages = self._advantage(batch.rewards, batch.groups, self._advantage_options)
        return advantages

    def _lay_out(self, batch: TrainBatch, advantages: Advantages) -> list[list[Microbatch]]:
        """This rank's microbatches, step by step, each weighted by the counts of its whole step."""
        rank_steps = batch.plan.assignment[self.world.rank]
        laid = []
        for step, own in enumerate(rank_steps):
            members = sorted(i for rank in batch.plan.assignment for mb in rank[step] for i in mb)
            weights = np.zeros(batch.plan.num_samples)
            weights[members] = sample_weights(batch.loss_tokens[members], self._config.algorithm.aggregation)
            laid.append(
                [
                    assemble(
                        batch, indices, layout=self._config.data.layout, device=self.world.device,
                        advantages=advantages.values, weights=weights,
                    )
                    for indices in own
                ]
            )  # fmt: skip
        return laid

    def _step(self, microbatches: Sequence[Microbatch], old: Sequence[Tensor | None]) -> StepReport:
        rate = learning_rate(self._optimizer_steps, self._config.optimizer, total_steps=self._total_steps)
        set_learning_rate(self._optimizer, rate)
        report = optimizer_step(
            StepInputs(
                microbatches=microbatches,
                old_log_probs=old,
                temperature=self._config.engine.temperature,
                clip_norm=self._config.optimizer.clip_norm,
                max_log_prob_gap=self._config.algorithm.max_log_prob_gap,
                prefix="train",
            ),
            self.model, self._optimizer, self.world,
            loss=lambda inputs: self._loss(inputs, self._loss_options),
            settle=lambda: self._settle(recompute=self._config.model.activation_checkpointing == "full"),
            session=self._session,
        )  # fmt: skip
        self._optimizer_steps += 1
        self._count_skipped(report)
        return StepReport(stepped=report.stepped, metrics={**report.metrics, "train/lr": rate})

    def _count_skipped(self, report: StepReport) -> None:
        self._skipped_in_a_row = 0 if report.stepped else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= self._config.optimizer.max_nonfinite_steps:
            raise CheckError(
                "training-nonfinite",
                f"loss or gradient was not finite in {self._skipped_in_a_row} steps in a row",
                f"optimizer step {self._optimizer_steps - 1}",
                "lower optimizer.lr or look at the last recorded rollouts",
            )

    @property
    def _session(self) -> ReplaySession | None:
        return self.routes.session if self.routes is not None else None

    def _score(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        return score(
            self.model,
            microbatches,
            within=under(self._session),
            temperature=self._config.engine.temperature,
        )

    def _replaying(self, samples: Mapping[int, Sample]) -> AbstractContextManager[None]:
        if self.routes is None:
            return nullcontext()
        # Together: a rank that refuses its routes must not leave the others in the forward pass.
        self.world.together("taking the routes of a batch", partial(self.routes.require, samples))
        return self.routes.replaying(samples)

    def _settle(self, *, recompute: bool) -> dict[str, float]:
        if self.routes is None:
            return {}
        return self.routes.session.settle(recompute=recompute, reduce=self.world.sum).published()


def _no_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), nullcontext()
