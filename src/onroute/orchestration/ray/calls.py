"""Awaiting actors: every wait has a name and a deadline, and the first cause is what is raised."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from onroute.core.errors import MachineError, OnrouteError

Result = TypeVar("Result")

GRACE_S = 2.0
"""How long the others are heard after a first failure: a rank that lost its peer may be heard before the
news that the peer died."""
DIED = "ray-actor-died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A deadline in seconds, and the key that sets it."""

    seconds: float
    key: str


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """What an actor was asked, and the words for that actor in errors."""

    role: str
    answer: Awaitable[Result]


class Calls:
    """Knows all actors of a run by their roles."""

    def __init__(self) -> None:
        self._roles: dict[str, str] = {}

    def enroll(self, role: str, actor: ActorHandle[Any]) -> None:
        """An actor may be enrolled again under a better name."""
        self._roles[actor._actor_id.hex()] = role

    async def one(self, call: Call[Result], *, phase: str, limit: Limit) -> Result:
        """The answer of a single actor. Raises like `all`."""
        (answer,) = await self.all([call], phase=phase, limit=limit)
        return answer

    async def all(self, calls: Sequence[Call[Result]], *, phase: str, limit: Limit) -> list[Result]:
        """All answers, in order.

        phase: for errors; what the actors do, as "training".

        Raises what an actor raised, or MachineError when one died or was late. When several fail, a death
        comes before an error of ours, and that before what is likely a consequence.
        """
        tasks = {asyncio.ensure_future(_awaited(call.answer)): call for call in calls}
        try:
            done, waiting = await asyncio.wait(
                tasks, timeout=limit.seconds, return_when=asyncio.FIRST_EXCEPTION
            )
            failed = any(task.exception() is not None for task in done)
            if failed and waiting:
                await asyncio.wait(waiting, timeout=GRACE_S)
            if failed:
                self._raise_first_cause(tasks, phase)
            if waiting:
                raise _late([tasks[task].role for task in waiting], phase, limit)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    def _raise_first_cause(self, tasks: dict[asyncio.Task[Result], Call[Result]], phase: str) -> None:
        raised = [
            (error, self._cause(error, call.role, phase))
            for task, call in tasks.items()
            if task.done() and (error := task.exception()) is not None
        ]
        error, cause = min(raised, key=lambda pair: _likely_consequence(pair[1]))
        raise cause from (None if cause is error else error)

    def _cause(self, error: BaseException, role: str, phase: str) -> BaseException:
        cause = error
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
            cause = cause.cause
        if isinstance(cause, RayActorError):
            return _death(cause, self._roles.get(cause.actor_id or "", role), phase)
        if isinstance(cause, RayError):
            return MachineError(
                "ray-failed",
                f"{type(cause).__name__}: {_first_line(cause)}",
                f"{role}, while {phase}",
                "see Ray's logs; a run with checkpoints goes on with --run.resume=auto",
            )
        return cause


async def _awaited(answer: Awaitable[Result]) -> Result:
    return await answer


def _likely_consequence(cause: BaseException) -> int:
    if isinstance(cause, OnrouteError):
        return 0 if cause.code == DIED else 1
    return 2


def _death(error: RayActorError, role: str, phase: str) -> MachineError:
    pid = re.search(r"pid: (\d+)", str(error))
    process = f" (process {pid[1]})" if pid else ""
    memory = re.search(r"memory usage|OutOfMemory|OOM", _first_line(error))
    return MachineError(
        DIED,
        f"{role}{process} died{', out of memory' if memory else ''}",
        f"while {phase}",
        "see its log in Ray's session folder and the kernel's log for lack of memory; "
        "go on with --run.resume=auto",
    )


def _late(roles: Sequence[str], phase: str, limit: Limit) -> MachineError:
    return MachineError(
        "ray-timeout",
        f"no answer from {', '.join(roles)} within {limit.seconds:g} s",
        f"while {phase}",
        f"see what it is busy with; raise {limit.key} only if it was working",
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
