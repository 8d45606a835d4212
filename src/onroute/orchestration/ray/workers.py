"""The actors of environments, and all of them as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from onroute.core.config.sections import RunConfig
from onroute.core.engine import Sampler
from onroute.core.environment import Environment
from onroute.core.errors import MachineError
from onroute.core.samples import Completion, Group, Prompt, SampleRequest
from onroute.core.sampling import SamplingParams
from onroute.data.batch import facts_of
from onroute.orchestration.handles import Rollout
from onroute.orchestration.intake import Intake
from onroute.orchestration.ray.calls import Call, Calls, Limit
from onroute.orchestration.ray.cluster import WATCH
from onroute.orchestration.ray.engine import EngineActor
from onroute.orchestration.ray.rounds import JoinedSampler, Seat
from onroute.orchestration.rollout import roll_out
from onroute.orchestration.together import together

BuildEnvironment: TypeAlias = Callable[[RunConfig], Environment]

BEYOND_S = 5.0
"""How much longer than a worker itself the driver waits, before it takes the worker for blocked."""


class EnvironmentWorker:
    """Rolls out its share of a batch and puts each checked group into the object store."""

    def __init__(self, config: RunConfig, engine: ActorHandle[EngineActor], build: BuildEnvironment) -> None:
        self._timeout_s = config.environment.timeout_s
        self._config, self._engine, self._build = config, engine, build

    @ray.method(concurrency_group=WATCH)
    async def stay(self) -> None:
        """Never returns: whoever awaits it hears of this actor's death."""
        await asyncio.Event().wait()

    async def start(self) -> None:
        self._environment = self._build(self._config)

    async def rollout(
        self,
        seat: Seat,
        intake: Intake,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        n: int,
        sampling: SamplingParams,
    ) -> list[Rollout[ObjectRef[Group]]]:
        """See `RolloutHandle.rollout`."""

        async def ask(requests: Sequence[SampleRequest]) -> list[Completion]:
            answered: list[Completion] = await self._engine.sample_round.remote(seat, requests)
            return answered

        sampler = JoinedSampler(ask)
        try:
            groups = await together(
                self._one(prompt, sampler, n=n, sampling=sampling, seed=seed)
                for prompt, seed in zip(prompts, seeds, strict=True)
            )
        finally:
            self._engine.leave.remote(seat)
        intake.check(groups)
        return [
            Rollout(prompt_id=group.prompt.id, facts=facts_of(group), held=ray.put(group)) for group in groups
        ]

    async def _one(
        self, prompt: Prompt, sampler: Sampler, *, n: int, sampling: SamplingParams, seed: int
    ) -> Group:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await roll_out(self._environment, prompt, sampler, n=n, sampling=sampling, seed=seed)
        except TimeoutError as error:
            raise MachineError(
                "environment-timeout",
                f"its rollout was not done after {self._timeout_s:g} s",
                f"prompt {prompt.id}",
                "see what the environment waits for, or raise environment.timeout_s",
            ) from error


class RayRollouts:
    """A `RolloutHandle` around the workers: each takes a run of neighbouring prompts."""

    def __init__(
        self, workers: Sequence[ActorHandle[EnvironmentWorker]], intake: Intake, calls: Calls, limit: Limit
    ) -> None:
        self._workers, self._intake, self._calls = workers, intake, calls
        self._limit = replace(limit, seconds=limit.seconds + BEYOND_S)
        self._batch = 0

    async def rollout(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, n: int, sampling: SamplingParams
    ) -> list[Rollout[ObjectRef[Group]]]:
        self._batch += 1
        shares = contiguous(len(prompts), len(self._workers))
        asked: list[Call[list[Rollout[ObjectRef[Group]]]]] = [
            Call(
                f"environment worker {number}",
                self._workers[number].rollout.remote(
                    Seat(batch=self._batch, number=number, of=len(shares)),
                    self._intake,
                    prompts[share],
                    seeds[share],
                    n,
                    sampling,
                ),
            )
            for number, share in enumerate(shares)
        ]
        answers = await self._calls.all(asked, phase="rolling out", limit=self._limit)
        return [rollout for answer in answers for rollout in answer]


def contiguous(count: int, shares: int) -> list[slice]:
    """`count` items in up to `shares` runs of equal length or one less, none of them empty."""
    used = min(count, shares)
    ends = [(number + 1) * count // used for number in range(used)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
