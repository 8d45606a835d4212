"""Runs a function on several gloo ranks inside a test, each rank a process with one thread.

    def total(world: World, start: int) -> float:
        return world.sum(torch.tensor(float(start + world.rank))).item()

    assert run_world(2, total, 10) == [21.0, 21.0]

The function must be at the top level of a module; arguments and results are pickled. Ranks are forked
from a server that has torch, transformers and onroute loaded, so that only the first call of a pytest
session waits for imports. The environment of a rank is the one torchrun gives.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from onroute.models.world import World, open_world

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

DEADLINE_S = 60.0
GRACE_S = 3.0
"""How long the other ranks may take to end by themselves once one has failed."""

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.checkpoint.state_dict",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "onroute.models.names",
        "onroute.models.shard",
        "onroute.models.tiny",
    ]
)


class RankLost(AssertionError):
    """A rank ended without an answer, or gave none before the deadline."""


def run_world(
    size: int,
    function: Callable[Concatenate[World, Arguments], Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> list[Result]:
    """`function(world, *args, **kwargs)` on `size` ranks; its results by rank.

    A rank's exception is raised here with a note of its rank, after all ranks are gone.
    """
    return run_ranks(size, _open_and_call, (function, args, kwargs))


def run_ranks(
    size: int, function: Callable[..., Result], args: tuple[Any, ...] = (), *, deadline_s: float = DEADLINE_S
) -> list[Result]:
    """`function(*args)` on `size` ranks which open a world themselves, or none; its results by rank.

    Raises the first exception that is no consequence of another rank's; RankLost for a rank that died
    or that was still running after `deadline_s`. No process is left in any case.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ranks: dict[Connection, tuple[int, ForkServerProcess]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                ours, theirs = _SERVER.Pipe(duplex=False)
                stacks = Path(folder) / f"{rank}"
                environment = _environment(rank, size, store.port)
                process = _SERVER.Process(
                    target=_rank_main,
                    args=(theirs, environment, stacks, deadline_s, function, args),
                    daemon=True,
                )
                process.start()
                theirs.close()
                ranks[ours] = (rank, process)
            return _collect(ranks, Path(folder), deadline_s)
        finally:
            for connection, (_, process) in ranks.items():
                connection.close()
                process.kill()
                process.join()


def _collect(
    ranks: dict[Connection, tuple[int, ForkServerProcess]], folder: Path, deadline_s: float
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[Exception] = []
    waiting = list(ranks)
    end = time.monotonic() + deadline_s
    while waiting and wait(waiting, timeout=max(0.0, end - time.monotonic())):
        for connection in [one for one in waiting if one.poll()]:
            waiting.remove(connection)
            rank, process = ranks[connection]
            try:
                succeeded, answer = connection.recv()
            except EOFError:
                process.join()
                succeeded, answer = False, RankLost(f"rank {rank} exited with code {process.exitcode}")
            if succeeded:
                results[rank] = answer
            else:
                failures.append(answer)
                end = min(end, time.monotonic() + GRACE_S)
    if failures:
        raise min(failures, key=_is_consequence)
    if waiting:
        late = sorted(ranks[connection][0] for connection in waiting)
        stacks = "\n".join(f"rank {rank}:\n{(folder / str(rank)).read_text()}" for rank in late)
        raise RankLost(f"rank(s) {late} still running after {deadline_s:g} s\n{stacks}")
    return [results[rank] for rank in sorted(results)]


def _is_consequence(failure: Exception) -> bool:
    """A rank that lost its peer fails too, and may be heard of first."""
    return isinstance(failure, RuntimeError) and "by peer" in str(failure)


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store lives in the test's process, as it lives in torchrun's: no port is taken twice.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _rank_main(
    connection: Connection,
    environment: dict[str, str],
    stacks: Path,
    deadline_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    with stacks.open("w") as file:
        faulthandler.dump_traceback_later(0.8 * deadline_s, file=file)
        try:
            answer: tuple[bool, Any] = (True, function(*args))
            words = pickle.dumps(answer)
        except Exception as error:
            words = _failure(error, environment["RANK"])
        faulthandler.cancel_dump_traceback_later()
    connection.send_bytes(words)
    connection.close()


def _failure(error: Exception, rank: str) -> bytes:
    trace = "".join(traceback.format_exception(error))
    error.add_note(f"on rank {rank}:\n{trace}")
    try:
        words = pickle.dumps((False, error))
        pickle.loads(words)
    except Exception:
        lost = RankLost(f"rank {rank} failed: {type(error).__name__}: {error}")
        lost.add_note(trace)
        return pickle.dumps((False, lost))
    return words


def _open_and_call(function: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    with open_world(timeout_s=DEADLINE_S) as world:
        return function(world, *args, **kwargs)
