"""The first cause is raised, deadlines have names, and an interrupt never cuts a common step short."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from ray import ActorID
from ray.exceptions import RayActorError, RayTaskError

from onroute.core.errors import CheckError, MachineError
from onroute.orchestration.ray.calls import DIED, Call, Calls, Limit
from onroute.orchestration.together import finished

LIMIT = Limit(seconds=5.0, key="parallel.timeout_s")
DEATH = MachineError(DIED, "engine 0 died", "while pushing", "start again")
REFUSED = CheckError("weights-names", "unknown tensor", "weight update", "same model")
LOST_PEER = RuntimeError("Connection closed by peer")


class Handle:
    """As much of an actor's handle as calls look at."""

    _actor_id = ActorID(b"0123456789abcdef")


def death_of(actor: Handle) -> RayActorError:
    return RayActorError(actor._actor_id.hex(), "The actor died unexpectedly before finishing this task.")


async def fails(error: Exception, after_s: float) -> None:
    await asyncio.sleep(after_s)
    raise error


def raised(*errors: Exception) -> Exception:
    """What is raised when the actors fail one after the other."""

    async def ask() -> None:
        calls = [Call(f"rank {n}", fails(error, 0.05 * n)) for n, error in enumerate(errors)]
        await Calls(Path()).all(calls, phase="training", limit=LIMIT)

    with pytest.raises(type(errors[0]).__mro__[-3]) as caught:
        asyncio.run(ask())
    return caught.value


def test_a_death_comes_before_an_error_of_ours_and_that_before_a_consequence():
    assert raised(LOST_PEER, REFUSED, DEATH) is DEATH
    assert raised(LOST_PEER, REFUSED) is REFUSED
    assert raised(REFUSED, LOST_PEER) is REFUSED
    assert raised(LOST_PEER) is LOST_PEER


def test_a_failure_is_not_held_up_by_one_that_never_answers():
    async def ask() -> None:
        calls = [Call("rank 0", asyncio.Event().wait()), Call("rank 1", fails(REFUSED, 0.0))]
        await Calls(Path()).all(calls, phase="training", limit=Limit(seconds=60, key="parallel.timeout_s"))

    begun = time.monotonic()
    with pytest.raises(CheckError, match="weights-names"):
        asyncio.run(ask())
    assert time.monotonic() - begun < 4


def test_who_is_late_is_named_with_the_phase_and_the_key():
    async def ask() -> None:
        calls = [Call("rank 0", asyncio.sleep(0)), Call("rank 1", asyncio.sleep(60))]
        await Calls(Path()).all(
            calls, phase="saving step-000002", limit=Limit(seconds=0.1, key="parallel.timeout_s")
        )

    with pytest.raises(
        MachineError,
        match=r"ray-timeout.*from rank 1 within 0\.1 s; while saving step-000002;.*parallel\.timeout_s",
    ):
        asyncio.run(ask())


def test_answers_come_in_the_order_of_the_calls():
    async def ask() -> list[int]:
        calls = [Call(f"rank {n}", asyncio.sleep(0.02 * (3 - n), n)) for n in range(3)]
        return await Calls(Path()).all(calls, phase="training", limit=LIMIT)

    assert asyncio.run(ask()) == [0, 1, 2]


def test_an_interrupt_waits_until_the_step_is_done_and_comes_at_the_next_await():
    seen: list[str] = []

    async def step() -> str:
        await asyncio.sleep(0.1)
        seen.append("step done")
        return "result"

    async def driver() -> None:
        seen.append(await finished(step()))
        seen.append("counted")
        await asyncio.sleep(10)
        seen.append("never")

    async def interrupted() -> None:
        task = asyncio.ensure_future(driver())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelling() == 1  # as asyncio.run counts it to tell Ctrl-C from another end

    asyncio.run(interrupted())
    assert seen == ["step done", "result", "counted"]


def test_a_step_that_fails_raises_its_own_error_though_it_was_interrupted():
    async def interrupted() -> None:
        task = asyncio.ensure_future(finished(fails(REFUSED, 0.05)))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(CheckError, match="weights-names"):
        asyncio.run(interrupted())


def test_the_death_of_one_that_is_not_asked_ends_the_call_to_the_others(tmp_path):
    async def ask() -> None:
        calls = Calls(tmp_path)
        calls.enroll("environment worker 3", Handle())
        calls.watch(fails(death_of(Handle()), 0.05))
        await calls.all([Call("rank 0", asyncio.Event().wait())], phase="training", limit=LIMIT)

    begun = time.monotonic()
    with pytest.raises(MachineError, match=r"ray-actor-died.*environment worker 3 died; while training"):
        asyncio.run(ask())
    assert time.monotonic() - begun < 3


def test_a_death_that_came_between_two_calls_is_told_by_the_next(tmp_path):
    async def ask() -> None:
        calls = Calls(tmp_path)
        calls.enroll("engine 0", Handle())
        calls.watch(fails(death_of(Handle()), 0.0))
        await asyncio.sleep(0.05)
        await calls.all([Call("rank 0", asyncio.sleep(0))], phase="saving", limit=LIMIT)

    with pytest.raises(MachineError, match=r"engine 0 died; while saving"):
        asyncio.run(ask())


def test_watched_actors_that_stay_alive_disturb_nothing(tmp_path):
    async def ask() -> list[int]:
        calls = Calls(tmp_path)
        calls.watch(asyncio.Event().wait())
        return await calls.all([Call("rank 0", asyncio.sleep(0.02, 7))], phase="training", limit=LIMIT)

    assert asyncio.run(ask()) == [7]


def test_an_unforeseen_error_of_an_actor_is_one_line_with_its_traceback_in_the_run_folder(tmp_path):
    remote = RayTaskError("train()", "Traceback (most recent call last):\n  in train\n", ValueError("7 > 6"))

    async def ask() -> None:
        calls = [Call("trainer rank 1", fails(remote.as_instanceof_cause(), 0.0))]
        await Calls(tmp_path).all(calls, phase="training", limit=LIMIT)

    with pytest.raises(
        MachineError, match=r"ray-exception\] ValueError: 7 > 6; trainer rank 1, while training; "
    ) as caught:
        asyncio.run(ask())
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    assert "in train" in (tmp_path / "traceback.txt").read_text()
