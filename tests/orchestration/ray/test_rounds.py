"""What several processes ask is sampled together, in an order that no clock decides."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from onroute.core.samples import Completion, SampleRequest
from onroute.core.sampling import SamplingParams
from onroute.orchestration.ray.rounds import JoinedSampler, Rounds, Seat

SAMPLING = SamplingParams(max_new_tokens=1, temperature=1.0, top_p=1.0, top_k=None)


def request(name: str) -> SampleRequest:
    return SampleRequest(id=name, prompt_tokens=np.array([1], np.int32), sampling=SAMPLING, seed=0)


class Recorder:
    """A sampler that remembers the ids of each call and answers with them."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self.calls.append([one.id for one in requests])
        if "bad" in self.calls[-1]:
            raise ValueError("no")
        await asyncio.sleep(0)
        empty = np.zeros(0, np.int32)
        return [
            Completion(
                id=one.id, tokens=empty, log_probs=empty.astype(np.float32), routing=None,
                stop_reason="stop", weight_versions=empty,
            )
            for one in requests
        ]  # fmt: skip


def ids(completions: Sequence[Completion]) -> list[str]:
    return [one.id for one in completions]


@pytest.mark.parametrize("arrival", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_round_is_one_call_in_the_order_of_seats_whoever_comes_first(arrival):
    engine = Recorder()
    asked = {0: ["a", "b"], 1: ["c"], 2: ["d", "e"]}

    async def play() -> dict[int, list[str]]:
        rounds = Rounds(engine)
        answers: dict[int, list[str]] = {}

        async def one(number: int, turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            seat = Seat(batch=1, number=number, of=3)
            answers[number] = ids(await rounds.sample(seat, [request(name) for name in asked[number]]))

        await asyncio.gather(*(one(number, 5 * turns) for turns, number in enumerate(arrival)))
        return answers

    assert asyncio.run(play()) == asked
    assert engine.calls == [["a", "b", "c", "d", "e"]]


def test_a_seat_that_left_is_not_waited_for_in_later_rounds():
    engine = Recorder()

    async def play() -> None:
        rounds = Rounds(engine)

        async def asks(number: int, *names: str) -> None:
            seat = Seat(batch=1, number=number, of=3)
            for name in names:
                await rounds.sample(seat, [request(name)])
            rounds.leave(seat)

        await asyncio.gather(asks(0, "a1", "a2", "a3"), asks(1), asks(2, "c1", "c2"))

    asyncio.run(asyncio.wait_for(play(), 5))
    assert engine.calls == [["a1", "c1"], ["a2", "c2"], ["a3"]]


def test_a_batch_that_was_given_up_does_not_hold_the_next():
    engine = Recorder()

    async def play() -> None:
        rounds = Rounds(engine)
        given_up = asyncio.ensure_future(rounds.sample(Seat(batch=1, number=0, of=2), [request("old")]))
        await asyncio.sleep(0)
        given_up.cancel()
        await rounds.sample(Seat(batch=2, number=0, of=1), [request("new")])

    asyncio.run(asyncio.wait_for(play(), 5))
    assert engine.calls == [["new"]]


def test_rollouts_of_one_process_ask_once_and_each_gets_its_own():
    engine = Recorder()

    async def play() -> list[list[str]]:
        sampler = JoinedSampler(engine.sample)

        async def rollout(name: str, turns: int) -> list[str]:
            for _ in range(turns):
                await asyncio.sleep(0)
            first = ids(await sampler.sample([request(f"{name}1"), request(f"{name}2")]))
            return first + ids(await sampler.sample([request(f"{name}3")]))

        return await asyncio.gather(rollout("a", 0), rollout("b", 2))

    assert asyncio.run(play()) == [["a1", "a2", "a3"], ["b1", "b2", "b3"]]
    assert engine.calls == [["a1", "a2", "b1", "b2"], ["a3", "b3"]]


def test_an_error_of_the_engine_reaches_all_who_asked_and_the_next_round_is_served():
    engine = Recorder()

    async def play() -> list[object]:
        rounds = Rounds(engine)
        seats = [Seat(batch=1, number=number, of=2) for number in range(2)]
        failed = await asyncio.gather(
            rounds.sample(seats[0], [request("bad")]),
            rounds.sample(seats[1], [request("good")]),
            return_exceptions=True,
        )
        again = await asyncio.gather(*(rounds.sample(seat, [request("x")]) for seat in seats))
        return [*failed, *map(ids, again)]

    first, second, *again = asyncio.run(asyncio.wait_for(play(), 5))
    assert isinstance(first, ValueError)
    assert isinstance(second, ValueError)
    assert again == [["x"], ["x"]]
