"""The helper for tests on several ranks: results by rank, failures by name, nobody left behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from onroute.core.errors import UserError
from onroute.models.world import World
from tests.ranks import RankLost, run_ranks, run_world


def total(world: World, start: int) -> float:
    return world.sum(torch.tensor(float(start + world.rank))).item()


def refuse_on_one(world: World) -> None:
    if world.rank == 1:
        raise UserError("test-refused", "3 of 4", "rank one", "do not")
    world.sum(torch.ones(1))


def die_on_zero() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_on_one() -> int:
    if os.environ["RANK"] == "1":
        time.sleep(60)
    return os.getpid()


def give_a_lambda() -> object:
    return lambda: 0


@pytest.mark.parametrize(("size", "expected"), [(1, [10.0]), (2, [21.0] * 2), (3, [33.0] * 3)])
def test_results_come_back_by_rank(size: int, expected: list[float]):
    assert run_world(size, total, 10) == expected


def test_a_ranks_exception_is_raised_with_its_rank():
    with pytest.raises(UserError, match=r"^\[test-refused\] 3 of 4; rank one; do not\n") as caught:
        run_world(2, refuse_on_one)
    assert caught.value.__notes__[0].startswith("on rank 1:")


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankLost, match="rank 0 exited with code -9"):
        run_ranks(2, die_on_zero)


def test_a_rank_past_the_deadline_is_named_with_its_stack_and_killed():
    begin = time.monotonic()
    with pytest.raises(
        RankLost, match=r"rank\(s\) \[1\] still running after 2 s\nrank 1:\n(.|\n)*sleep_on_one"
    ):
        run_ranks(2, sleep_on_one, deadline_s=2.0)
    assert time.monotonic() - begin < 10


def test_an_answer_that_cannot_travel_is_the_ranks_failure():
    with pytest.raises(AttributeError, match="lambda"):
        run_ranks(1, give_a_lambda)
