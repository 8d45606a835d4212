"""Joins the requests of concurrent callers into batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onroute.core.samples import Completion, SampleRequest

_QUIET_TURNS = 3


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: SampleRequest
    answer: asyncio.Future[Completion]


class RequestQueue:
    """Runs `run_batch` on what is waiting, up to `max_batch_size` requests at a time.

    `run_batch` blocks the event loop: nothing else of the process would gain from the time, and
    which requests share a batch then depends on the program alone, never on the clock.
    """

    def __init__(
        self, run_batch: Callable[[Sequence[SampleRequest]], list[Completion]], max_batch_size: int
    ) -> None:
        self._run_batch = run_batch
        self._max_batch_size = max_batch_size
        self._waiting: deque[_Waiting] = deque()
        self._drain_task: asyncio.Task[None] | None = None

    async def submit(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Completions in the order of `requests`. A batch that fails fails all its callers."""
        loop = asyncio.get_running_loop()
        mine = [_Waiting(request, loop.create_future()) for request in requests]
        self._waiting.extend(mine)
        if self._drain_task is None or self._drain_task.done():
            self._drain_task = loop.create_task(self._drain())
        return list(await asyncio.gather(*(waiting.answer for waiting in mine)))

    async def idle(self) -> None:
        """Return when every request submitted so far has been answered."""
        if self._drain_task is not None:
            await asyncio.shield(self._drain_task)

    def fail(self, error: Exception) -> None:
        """Answer everything that waits with `error`."""
        for waiting in self._waiting:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        self._waiting.clear()

    async def _drain(self) -> None:
        while self._waiting:
            await self._settle()
            batch = self._take()
            if not batch:
                continue
            try:
                answers = self._run_batch([waiting.request for waiting in batch])
            except Exception as error:  # handed to the callers, who raise it
                for waiting in batch:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)
                continue
            for waiting, answer in zip(batch, answers, strict=True):
                if not waiting.answer.done():  # its caller was cancelled while the batch ran
                    waiting.answer.set_result(answer)

    async def _settle(self) -> None:
        """Let every task that is ready come to its request: wait until no request joins any more."""
        quiet = 0
        while quiet < _QUIET_TURNS:
            before = len(self._waiting)
            await asyncio.sleep(0)
            quiet = 0 if len(self._waiting) != before else quiet + 1

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._max_batch_size:
            waiting = self._waiting.popleft()
            if not waiting.answer.done():  # its caller was cancelled
                batch.append(waiting)
        return batch
