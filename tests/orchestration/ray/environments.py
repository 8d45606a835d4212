"""Environments that misbehave, built inside the workers of a run on Ray."""

from __future__ import annotations

import asyncio
import os
import time

from onroute.core.config.sections import RunConfig
from onroute.core.engine import Sampler
from onroute.core.environment import Demonstrator, Environment
from onroute.core.samples import Group, Prompt, Split, Tokens
from onroute.core.sampling import SamplingParams
from onroute.orchestration.environments import build_environment


class Spoiled:
    """The real environment, but for its rollouts of prompts to train on."""

    def __init__(self, real: Environment) -> None:
        self.real = real

    def prompt(self, split: Split, index: int) -> Prompt:
        return self.real.prompt(split, index)

    async def rollout(
        self, prompt: Prompt, sampler: Sampler, *, n: int, sampling: SamplingParams, seed: int
    ) -> Group:
        if prompt.id.split("/")[1] == "train":
            await self.spoil()
        return await self.real.rollout(prompt, sampler, n=n, sampling=sampling, seed=seed)

    def demonstration(self, prompt: Prompt) -> Tokens:
        assert isinstance(self.real, Demonstrator)
        return self.real.demonstration(prompt)

    async def spoil(self) -> None: ...


class Raising(Spoiled):
    async def spoil(self) -> None:
        raise RuntimeError("the verifier fell over")


class Waiting(Spoiled):
    async def spoil(self) -> None:
        await asyncio.Event().wait()


class Blocking(Spoiled):
    async def spoil(self) -> None:
        time.sleep(3600)


class Dying(Spoiled):
    async def spoil(self) -> None:
        os._exit(1)


class Slow(Spoiled):
    async def spoil(self) -> None:
        await asyncio.sleep(0.5)


def raising(config: RunConfig) -> Environment:
    return Raising(build_environment(config))


def waiting(config: RunConfig) -> Environment:
    return Waiting(build_environment(config))


def blocking(config: RunConfig) -> Environment:
    return Blocking(build_environment(config))


def dying(config: RunConfig) -> Environment:
    return Dying(build_environment(config))


def slow(config: RunConfig) -> Environment:
    return Slow(build_environment(config))
