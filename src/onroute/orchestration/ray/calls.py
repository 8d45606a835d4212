"""Awaiting actors: every wait has a name and a deadline, and the first cause is what is raised."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from onroute.core.errors import MachineError, OnrouteError
from onroute.core.tracebacks import keep_traceback

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
    """Knows all actors of a run by their roles, and hears of a death whoever is being asked."""

    def __init__(self, folder: Path) -> None:
        """folder: of the run; tracebacks of actors go there."""
        self._folder = folder
        self._roles: dict[str, str] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._first_death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def enroll(self, role: str, actor: ActorHandle[Any]) -> None:
        """An actor may be enrolled again under a better name."""
        self._roles[actor._actor_id.hex()] = role

    def watch(self, stay: Awaitable[None]) -> None:
        """stay: a call that an actor answers by its death alone, which then ends every call to others."""
        task = asyncio.ensure_future(_awaited(stay))
        self._watches.add(task)
        task.add_done_callback(self._hear)

    def _hear(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled() or self._first_death.done():
            return
        death = watch.exception()
        if death is not None:
            self._first_death.set_result(death)

    async def one(self, call: Call[Result], *, phase: str, limit: Limit) -> Result:
        """The answer of a single actor. Raises like `all`."""
        (answer,) = await self.all([call], phase=phase, limit=limit)
        return answer

    async def all(self, calls: Sequence[Call[Result]], *, phase: str, limit: Limit) -> list[Result]:
        """All answers, in order.

        phase: for errors; what the actors do, as "training".

        Raises what an actor raised, or MachineError when one died or was late, be it one that was not asked.
        When several fail, a death comes before an error of ours, and that before what is likely a
        consequence.
        """
        tasks = {asyncio.ensure_future(_awaited(call.answer)): call for call in calls}
        try:
            await self._until(tasks, asyncio.FIRST_EXCEPTION, limit.seconds)
            if self._has_failed(tasks):
                await self._until(tasks, asyncio.ALL_COMPLETED, GRACE_S)
                raise self._first_cause(tasks, phase)
            waiting = [call.role for task, call in tasks.items() if not task.done()]
            if waiting:
                raise _late(waiting, phase, limit)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _until(self, tasks: Iterable[asyncio.Task[Result]], what: str, timeout_s: float) -> None:
        """Wait for `what` of the tasks, or for a death, whichever comes first."""
        settled = asyncio.ensure_future(asyncio.wait(list(tasks), return_when=what))
        try:
            await asyncio.wait(
                (settled, self._first_death), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            settled.cancel()

    def _has_failed(self, tasks: Iterable[asyncio.Task[Result]]) -> bool:
        return self._first_death.done() or any(task.done() and task.exception() is not None for task in tasks)

    def _first_cause(self, tasks: dict[asyncio.Task[Result], Call[Result]], phase: str) -> BaseException:
        raised = [
            (error, self._cause(error, call.role, phase))
            for task, call in tasks.items()
            if task.done() and (error := task.exception()) is not None
        ]
        if self._first_death.done():
            death = self._first_death.result()
            raised.insert(0, (death, self._cause(death, "an actor", phase)))
        error, cause = min(raised, key=lambda pair: _likely_consequence(pair[1]))
        cause.__cause__ = None if cause is error else error
        return cause

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
        if isinstance(error, RayTaskError) and not isinstance(cause, OnrouteError):
            return self._unforeseen(error, cause, role, phase)
        return cause

    def _unforeseen(self, error: RayTaskError, cause: BaseException, role: str, phase: str) -> MachineError:
        file = keep_traceback(str(error), self._folder)
        return MachineError(
            "ray-exception",
            f"{type(cause).__name__}: {_first_line(cause)}",
            f"{role}, while {phase}",
            f"see its traceback in {file}; go on with --run.resume=auto when it is mended",
        )


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
    node = "its node has died" in str(error)
    reason = ", out of memory" if memory else ", its node was lost" if node else ""
    return MachineError(
        DIED,
        f"{role}{process} died{reason}",
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
