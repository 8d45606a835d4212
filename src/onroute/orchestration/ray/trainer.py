"""All trainer ranks as one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ray import ObjectRef
from ray.actor import ActorHandle

from onroute.core.batches import BatchPlan, StepReport
from onroute.core.config.sections import RunConfig
from onroute.core.engine import Engine
from onroute.core.samples import Group, Json, Sample
from onroute.core.weights import WeightOffer, WeightReceipt, WeightVersion
from onroute.data.batch import whole_batch
from onroute.data.plan import plan_batch
from onroute.orchestration.handles import Rollout
from onroute.orchestration.ray.calls import Call, Calls, Limit
from onroute.orchestration.ray.ranks import PlannedBatch, TrainerRank
from onroute.orchestration.together import finished
from onroute.weights.checksum import check_receipt


class RayTrainer:
    """A `TrainerHandle` around actors. An interrupt waits until all ranks are done with what they do."""

    def __init__(
        self, config: RunConfig, ranks: Sequence[ActorHandle[TrainerRank]], calls: Calls, limit: Limit
    ) -> None:
        self._config, self._ranks, self._calls, self._limit = config, ranks, calls, limit

    async def train(self, rollouts: Sequence[Rollout[ObjectRef[Group]]]) -> list[StepReport]:
        facts = [fact for rollout in rollouts for fact in rollout.facts]
        numbers = [number for number, rollout in enumerate(rollouts) for _ in rollout.facts]
        starts = [0, *accumulate(len(rollout.facts) for rollout in rollouts)]
        steps = self._config.data.optimizer_steps
        plan = self._plan(
            [fact.num_tokens for fact in facts],
            numbers,
            steps=steps,
            # Whole groups travel once; but where there are too few, a rank would have nothing to do.
            whole_groups=len(rollouts) // steps >= len(self._ranks),
        )
        batch = PlannedBatch(plan=plan, facts=facts, groups=numbers)
        asked: list[ObjectRef[list[StepReport]]] = []
        for rank, actor in enumerate(self._ranks):
            needed = sorted({numbers[index] for index in plan.samples_of(rank)})
            refs = [rollouts[number].held for number in needed]
            asked.append(actor.train.remote(batch, [starts[number] for number in needed], *refs))
        reports: list[list[StepReport]] = await self._all(asked, "training")
        return reports[0]

    async def supervise(self, samples: Sequence[Sample]) -> StepReport:
        numbers = list(range(len(samples)))
        plan = self._plan([sample.num_tokens for sample in samples], numbers, steps=1, whole_groups=False)
        reports: list[StepReport] = await self._all(
            [
                actor.supervise.remote(whole_batch(samples, numbers, plan, rank))
                for rank, actor in enumerate(self._ranks)
            ],
            "supervised training",
        )
        return reports[0]

    async def push(self, engines: Sequence[Engine], version: WeightVersion) -> Mapping[str, float]:
        return await finished(self._push(engines, version))

    async def _push(self, engines: Sequence[Engine], version: WeightVersion) -> Mapping[str, float]:
        begun = time.perf_counter()
        phase = f"pushing weights of version {version}"
        publish: Call[WeightOffer] = Call("trainer rank 0", self._ranks[0].publish.remote(version))
        offer = await self._calls.one(publish, phase=phase, limit=self._limit)
        sending: list[Call[Any]] = [
            *self._named([actor.send.remote(offer) for actor in self._ranks]),
            *(
                Call(f"engine {number}", engine.update_weights(offer))
                for number, engine in enumerate(engines)
            ),
        ]
        answers = await self._calls.all(sending, phase=phase, limit=self._limit)
        sent: WeightReceipt = answers[0]
        for number, receipt in enumerate(answers[len(self._ranks) :]):
            check_receipt(sent, receipt, engine=str(number))
        return {
            "push/bytes": float(sent.num_bytes),
            "push/tensors": float(sent.num_tensors),
            "push/seconds": time.perf_counter() - begun,
            "push/version": float(version),
        }

    async def record(self, folder: Path, step: int, rollouts: Sequence[Rollout[ObjectRef[Group]]]) -> None:
        groups = [rollout.held for rollout in rollouts]
        asked = [
            actor.record.remote(folder.absolute(), step, *(groups if rank == 0 else ()))
            for rank, actor in enumerate(self._ranks)
        ]
        await self._all(asked, f"recording step {step}")

    async def save(self, folder: Path, facts: dict[str, Json]) -> None:
        asked = [actor.save.remote(folder.absolute(), facts) for actor in self._ranks]
        await self._all(asked, f"saving {folder.name}")

    async def load(self, folder: Path) -> dict[str, Json]:
        asked = [actor.load.remote(folder.absolute()) for actor in self._ranks]
        facts: list[dict[str, Json]] = await self._all(asked, f"loading {folder.name}")
        return facts[0]

    async def _all(self, asked: Sequence[ObjectRef[Any]], phase: str) -> list[Any]:
        return await finished(self._calls.all(self._named(asked), phase=phase, limit=self._limit))

    def _named(self, asked: Sequence[ObjectRef[Any]]) -> list[Call[Any]]:
        return [Call(f"trainer rank {rank}", ref) for rank, ref in enumerate(asked)]

    def _plan(
        self, lengths: Sequence[int], numbers: Sequence[int], *, steps: int, whole_groups: bool
    ) -> BatchPlan:
        return plan_batch(
            lengths,
            numbers,
            ranks=len(self._ranks),
            steps=steps,
            layout=self._config.data.layout,
            microbatch_tokens=self._config.data.microbatch_tokens,
            whole_groups=whole_groups,
        )
