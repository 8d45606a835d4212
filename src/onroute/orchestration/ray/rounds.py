"""What environments in several processes ask of the engine, joined into one call.

A batch is sampled in rounds. In a round every process that still has rollouts to do brings what its
environments ask at that moment, and the engine samples all of it together, in the order of the
processes. So which requests share a batch depends on the program alone, never on the clock, and is
the same as in one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from onroute.core.engine import Sampler
from onroute.core.samples import Completion, SampleRequest

_QUIET_TURNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one process, `number` of `of`, in the rounds of a batch."""

    batch: int
    number: int
    of: int


@dataclass(slots=True)
class _Asked:
    requests: Sequence[SampleRequest]
    answer: asyncio.Future[list[Completion]]


@dataclass(slots=True)
class _Table:
    """Who still takes part in a batch, and who has asked in this round."""

    present: set[int]
    asked: dict[int, _Asked] = field(default_factory=dict)


class Rounds:
    """At the engine: waits for all who take part, then samples."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._tables: dict[int, _Table] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def sample(self, seat: Seat, requests: Sequence[SampleRequest]) -> list[Completion]:
        """The completions of `requests`, when every seat of the batch has asked or left."""
        asked = _Asked(requests, asyncio.get_running_loop().create_future())
        table = self._table(seat)
        table.asked[seat.number] = asked
        self._serve(table)
        return await asked.answer

    def leave(self, seat: Seat) -> None:
        """That seat asks nothing more in its batch."""
        table = self._table(seat)
        table.present.discard(seat.number)
        if table.present:
            self._serve(table)
        else:
            del self._tables[seat.batch]

    def _table(self, seat: Seat) -> _Table:
        for given_up in [batch for batch in self._tables if batch < seat.batch]:
            del self._tables[given_up]
        return self._tables.setdefault(seat.batch, _Table(set(range(seat.of))))

    def _serve(self, table: _Table) -> None:
        if not table.asked or table.asked.keys() < table.present:
            return
        asked = [table.asked[number] for number in sorted(table.asked)]
        table.asked = {}
        task = asyncio.get_running_loop().create_task(_answer(asked, self._sampler.sample))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)


class JoinedSampler:
    """A `Sampler` in an environment's process: asks at once what many rollouts ask at the same moment."""

    def __init__(self, ask: Callable[[Sequence[SampleRequest]], Awaitable[list[Completion]]]) -> None:
        self._ask = ask
        self._waiting: list[_Asked] = []
        self._asking: asyncio.Task[None] | None = None

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See `Sampler.sample`."""
        loop = asyncio.get_running_loop()
        asked = _Asked(requests, loop.create_future())
        self._waiting.append(asked)
        if self._asking is None or self._asking.done():
            self._asking = loop.create_task(self._ask_all())
        return await asked.answer

    async def _ask_all(self) -> None:
        while self._waiting:
            await self._settle()
            asked, self._waiting = self._waiting, []
            await _answer(asked, self._ask)

    async def _settle(self) -> None:
        """Let every task that is ready come to its request."""
        quiet = 0
        while quiet < _QUIET_TURNS:
            before = len(self._waiting)
            await asyncio.sleep(0)
            quiet = 0 if len(self._waiting) != before else quiet + 1


async def _answer(
    asked: Sequence[_Asked], ask: Callable[[Sequence[SampleRequest]], Awaitable[list[Completion]]]
) -> None:
    """Ask once for all of `asked`, and give each its own completions or the error."""
    try:
        completions = iter(await ask([request for one in asked for request in one.requests]))
    except Exception as error:  # handed to the callers, who raise it
        for one in asked:
            if not one.answer.done():
                one.answer.set_exception(error)
        return
    for one in asked:
        own = list(islice(completions, len(one.requests)))
        if not one.answer.done():  # its caller may have been cancelled
            one.answer.set_result(own)
