"""Concurrent requests share a batch; a batch that fails hurts only itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from onroute.core.samples import Completion, SampleRequest
from onroute.engines.batching import RequestQueue

MakeRequest = Callable[..., SampleRequest]
UNLUCKY = 1313


class Batches:
    """Answers with the request's seed as the only token, and remembers who shared a batch."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self.seen.append([request.seed for request in requests])
        if any(request.seed == UNLUCKY for request in requests):
            raise RuntimeError("unlucky")
        return [
            Completion(
                id=request.id,
                tokens=np.array([request.seed], dtype=np.int32),
                log_probs=np.zeros(1, dtype=np.float32),
                routing=None,
                stop_reason="length",
                weight_versions=np.zeros(1, dtype=np.int32),
            )
            for request in requests
        ]


def run(main: Callable[[RequestQueue], Coroutine[Any, Any, Any]], max_batch_size: int = 100) -> Batches:
    batches = Batches()

    async def start() -> None:
        await main(RequestQueue(batches, max_batch_size))

    asyncio.run(start())
    return batches


def test_callers_that_start_together_share_one_batch_in_order(make_request: MakeRequest) -> None:
    async def main(queue: RequestQueue) -> None:
        calls = [queue.submit([make_request(seed=2 * i), make_request(seed=2 * i + 1)]) for i in range(10)]
        answers = await asyncio.gather(*calls)
        tokens = [[completion.tokens[0] for completion in answer] for answer in answers]
        assert tokens == [[2 * i, 2 * i + 1] for i in range(10)]

    assert run(main).seen == [list(range(20))]


def test_callers_that_come_by_way_of_nested_tasks_join_too(make_request: MakeRequest) -> None:
    async def nested(queue: RequestQueue, depth: int, seed: int) -> None:
        if depth == 0:
            await queue.submit([make_request(seed=seed)])
        else:
            await asyncio.gather(*(nested(queue, depth - 1, 2 * seed + i) for i in range(2)))

    async def main(queue: RequestQueue) -> None:
        await asyncio.gather(queue.submit([make_request(seed=100)]), nested(queue, 3, 0))

    assert run(main).seen == [[100, *range(8)]]


def test_several_turns_make_one_batch_each(make_request: MakeRequest) -> None:
    async def turns(queue: RequestQueue, seed: int) -> None:
        for turn in range(3):
            await queue.submit([make_request(seed=10 * turn + seed)])

    async def main(queue: RequestQueue) -> None:
        await asyncio.gather(*(turns(queue, seed) for seed in range(3)))

    assert run(main).seen == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]


def test_no_batch_is_larger_than_allowed(make_request: MakeRequest) -> None:
    async def main(queue: RequestQueue) -> None:
        answer = await queue.submit([make_request(seed=i) for i in range(7)])
        assert [a.tokens[0] for a in answer] == list(range(7))

    assert run(main, max_batch_size=3).seen == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_failed_batch_reaches_its_callers_and_the_next_one_runs(make_request: MakeRequest) -> None:
    async def main(queue: RequestQueue) -> None:
        calls = [queue.submit([make_request(seed=seed)]) for seed in (1, UNLUCKY, 2)]
        first, second, third = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, RuntimeError)
        assert isinstance(second, RuntimeError)
        assert isinstance(third, list)

    assert run(main, max_batch_size=2).seen == [[1, UNLUCKY], [2]]


def test_a_cancelled_caller_costs_nothing(make_request: MakeRequest) -> None:
    async def main(queue: RequestQueue) -> None:
        doomed = asyncio.ensure_future(queue.submit([make_request(seed=5)]))
        kept = asyncio.ensure_future(queue.submit([make_request(seed=6)]))
        await asyncio.sleep(0)
        doomed.cancel()
        assert (await kept)[0].tokens[0] == 6
        with pytest.raises(asyncio.CancelledError):
            await doomed

    assert run(main).seen == [[6]]


def test_idle_returns_when_all_earlier_requests_are_answered(make_request: MakeRequest) -> None:
    async def main(queue: RequestQueue) -> None:
        await queue.idle()
        call = asyncio.ensure_future(queue.submit([make_request(seed=i) for i in range(4)]))
        await asyncio.sleep(0)
        await queue.idle()
        await asyncio.sleep(0)
        assert call.done()

    assert run(main, max_batch_size=1).seen == [[0], [1], [2], [3]]


def test_fail_answers_everything_that_waits(make_request: MakeRequest) -> None:
    async def main(queue: RequestQueue) -> None:
        call = asyncio.ensure_future(queue.submit([make_request(seed=1)]))
        await asyncio.sleep(0)
        queue.fail(RuntimeError("closing"))
        with pytest.raises(RuntimeError, match="closing"):
            await call

    assert run(main).seen == []


def test_an_empty_call_is_answered_at_once() -> None:
    async def main(queue: RequestQueue) -> None:
        assert await queue.submit([]) == []

    assert run(main).seen == []
