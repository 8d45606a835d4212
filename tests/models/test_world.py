"""What fails on one rank ends all of them, with the first one's words and in time."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from onroute.core.errors import CheckError, MachineError, OnrouteError, UserError
from onroute.models.world import World, open_world
from tests.ranks import run_ranks, run_world


class ShortOfRoutes(CheckError):
    """A kind that the other ranks need not know."""


def fail_on(world: World, failing: dict[int, Exception]) -> tuple[type, str, int]:
    def action() -> int:
        if world.rank in failing:
            raise failing[world.rank]
        return world.rank * 10

    try:
        result = world.together("reading the files", action)
    except OnrouteError as error:
        return type(error), str(error), error.exit_code
    return int, "", result


def test_every_rank_keeps_its_own_result_when_none_fails():
    assert run_world(3, fail_on, {}) == [(int, "", 0), (int, "", 10), (int, "", 20)]


@pytest.mark.parametrize("kind", [UserError, CheckError, MachineError])
def test_one_ranks_error_is_raised_on_all_with_its_rank_and_kind(kind: type[OnrouteError]):
    said = run_world(3, fail_on, {1: kind("a-code", "2 of 3", "layer 7", "do this")})
    assert said == [(kind, "[a-code] 2 of 3; layer 7 (rank 1); do this", kind.exit_code)] * 3


def test_of_several_errors_the_lowest_ranks_is_raised_on_all():
    failing = {n: UserError("a-code", f"on {n}", "here", "mend") for n in (2, 1)}
    assert run_world(3, fail_on, failing) == [(UserError, "[a-code] on 1; here (rank 1); mend", 2)] * 3


def test_a_subclass_arrives_as_the_kind_that_decides_the_exit_code():
    failing = {0: ShortOfRoutes("a-code", "what", "here", "mend")}
    assert run_world(2, fail_on, failing) == [(CheckError, "[a-code] what; here (rank 0); mend", 3)] * 2


@pytest.mark.parametrize("error", [ValueError("line one\nline two"), ValueError()])
def test_an_error_of_another_kind_becomes_one_line_that_says_where(error: ValueError):
    first = f"ValueError: {error}".splitlines()[0]
    line = f"[rank-failed] {first}; reading the files (rank 1); see that rank's log"
    assert run_world(2, fail_on, {1: error}) == [(MachineError, line, 4)] * 2


def test_a_single_process_raises_the_original():
    with open_world(timeout_s=5) as world, pytest.raises(ShortOfRoutes) as caught:
        world.together("here", lambda: _raise(ShortOfRoutes("a-code", "what", "here", "mend")))
    assert str(caught.value) == "[a-code] what; here; mend"
    with open_world(timeout_s=5) as world, pytest.raises(KeyError):
        world.together("here", lambda: _raise(KeyError("x")))


def _raise(error: Exception) -> None:
    raise error


def wait_for_a_sleeper() -> float:
    begin = time.monotonic()
    with open_world(timeout_s=1.5) as world:
        if world.rank == 1:
            time.sleep(4)
            return 0.0
        with pytest.raises(RuntimeError):
            world.together("waiting", lambda: None)
        return time.monotonic() - begin


def test_no_rank_waits_longer_than_the_deadline_for_one_that_is_stuck():
    waited, _ = run_ranks(2, wait_for_a_sleeper)
    assert 1.4 < waited < 3.5


def sums_and_maxima(world: World) -> tuple[list[float], list[float]]:
    own = torch.tensor([float(world.rank), 5.0 - world.rank])
    return world.sum(own.clone()).tolist(), world.max(own.clone()).tolist()


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, ([0.0, 5.0], [0.0, 5.0])), (3, ([3.0, 12.0], [2.0, 5.0]))],  # 0+1+2, 5+4+3
)
def test_sum_and_max_run_over_all_ranks(size: int, expected: tuple[list[float], list[float]]):
    assert run_world(size, sums_and_maxima) == [expected] * size


def test_a_world_closes_what_it_opened_also_after_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for _ in range(2):
        with pytest.raises(KeyError), open_world(timeout_s=5) as world:
            assert (world.rank, world.size, world.mesh.mesh_dim_names) == (0, 1, ("shard",))
            raise KeyError("x")
        assert not dist.is_initialized()


def threads_of() -> int:
    with open_world(timeout_s=30, threads=2):
        return torch.get_num_threads() * 10 + int(os.environ["LOCAL_RANK"])


def test_each_rank_computes_with_the_threads_asked_for():
    assert run_ranks(2, threads_of) == [20, 21]
