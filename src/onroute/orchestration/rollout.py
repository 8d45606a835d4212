"""One prompt through its environment, and whose fault it was when that failed."""

from __future__ import annotations

from collections.abc import Sequence

from onroute.core.engine import Sampler
from onroute.core.environment import Environment
from onroute.core.errors import MachineError, OnrouteError
from onroute.core.samples import Completion, Group, Prompt, SampleRequest
from onroute.core.sampling import SamplingParams
from onroute.core.tracebacks import keep_traceback, traceback_of


class _Watched:
    """The sampler of one rollout, remembering how it failed."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.failure: Exception | None = None

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        try:
            return await self._sampler.sample(requests)
        except Exception as error:
            self.failure = error
            raise


async def roll_out(
    environment: Environment, prompt: Prompt, sampler: Sampler, *, n: int, sampling: SamplingParams, seed: int
) -> Group:
    """See `Environment.rollout`.

    Raises what sampling raised as it is, and MachineError for what the environment raised by itself, with
    the file of its traceback.
    """
    watched = _Watched(sampler)
    try:
        return await environment.rollout(prompt, watched, n=n, sampling=sampling, seed=seed)
    except OnrouteError:
        raise
    except Exception as error:
        if watched.failure is not None:
            raise watched.failure from None
        lines = str(error).splitlines()
        raise MachineError(
            "environment-failed",
            f"{type(error).__name__}: {lines[0] if lines else 'no message'}",
            f"the environment's rollout of prompt {prompt.id}",
            f"see its traceback in {keep_traceback(traceback_of(error), None)}",
        ) from error
