"""Engines and trainers of the transport tests: real processes, told what to do over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

import tests.ranks as _preloads_the_server  # noqa: F401
from onroute.core.weights import TensorSpec, Transport, WeightOffer
from onroute.weights import broadcast, shared_memory
from onroute.weights.bucket import Bucket
from onroute.weights.checksum import spec_of
from onroute.weights.receiver import Receiver
from onroute.weights.sender import Sender

SERVER = multiprocessing.get_context("forkserver")
ANSWER_S = 20.0

KIND: dict[Transport, Any] = {"broadcast": broadcast, "shared_memory": shared_memory}

square = torch.arange(4096, dtype=torch.float32).view(64, 64)
MODEL = {
    "transposed": square.t(),
    "strided": square[:, ::2],
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "bfloat16": torch.arange(3000, dtype=torch.bfloat16),
    "float32": torch.tensor([float("nan"), float("inf"), -0.0]),
    "int64": torch.tensor([2**62, -1]),
    "bool": torch.tensor([True, False, True]),
    "large": torch.arange(50_000, dtype=torch.float32),
    "last": torch.ones(600),
}
SPECS = [spec_of(name, tensor) for name, tensor in MODEL.items()]


def units() -> Iterator[dict[str, torch.Tensor]]:
    for name, tensor in MODEL.items():
        yield {name: tensor}


Act = Literal["take", "raise", "die", "stall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What one tensor is when it arrives."""

    spec: TensorSpec
    is_contiguous: bool
    content: bytes


def arrived(bucket: Bucket) -> list[Arrived]:
    return [
        Arrived(
            spec=spec,
            is_contiguous=tensor.is_contiguous(),
            content=tensor.reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True)
    ]


PUBLISHED = [
    Arrived(
        spec=spec_of(name, tensor),
        is_contiguous=True,
        content=tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
    )
    for name, tensor in MODEL.items()
]


class Process:
    """A process that does what it is told, one call after the other, and keeps its own state."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = SERVER.Pipe()
        self._process = SERVER.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, *words: Any) -> None:
        self._pipe.send(words)

    def answer(self) -> Any:
        """Its next answer; raises it when it is an error."""
        if not self._pipe.poll(ANSWER_S):
            raise AssertionError(f"no answer within {ANSWER_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def freeze(self) -> None:
        """Stop it without an end, as a machine that hangs."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def stop(self) -> int | None:
        """Let it end by itself; its exit code."""
        self._pipe.close()
        self._process.join(ANSWER_S)
        code = self._process.exitcode
        self.kill()
        return code


def engine(pipe: Connection, transport: Transport, index: int, deadline_s: float) -> None:
    """Takes offers: answers "third" where it is about to act at the third bucket, then what it holds."""
    torch.set_num_threads(1)
    receiver: Receiver = KIND[transport].open_receiver(index, deadline_s=deadline_s)
    for offer, act in told(pipe):
        try:
            pipe.send(take(receiver, offer, act, pipe))
        except Exception as error:
            pipe.send(error)
    receiver.close()


def take(receiver: Receiver, offer: WeightOffer, act: Act, pipe: Connection) -> list[Arrived]:
    held: list[Arrived] = []
    with closing(receiver.receive(offer)) as arriving:
        for number, bucket in enumerate(arriving, start=1):
            held += arrived(bucket)
            if number == 3 and act != "take":
                pipe.send("third")
                if act == "raise":
                    raise RuntimeError("the engine broke")
                if act == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(1.0)
    return held


def trainer(pipe: Connection, transport: Transport, receivers: int) -> None:
    """Publishes when told, answers with the offer, and dies at the third unit."""
    torch.set_num_threads(1)
    sender: Sender = KIND[transport].open_sender(receivers=receivers, max_bytes=1024, deadline_s=30.0)

    def fatal_units() -> Iterator[dict[str, torch.Tensor]]:
        for number, unit in enumerate(units(), start=1):
            if number == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            yield unit

    for _ in told(pipe):
        offer = sender.publish(1, SPECS)
        pipe.send(offer)
        sender.send(offer, fatal_units())


def told(pipe: Connection) -> Iterator[Any]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


@contextmanager
def engines(transport: Transport, count: int, deadline_s: float = 30.0) -> Iterator[list[Process]]:
    processes = [Process(engine, transport, index, deadline_s) for index in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


@contextmanager
def opened(
    transport: Transport, receivers: int, max_bytes: int, deadline_s: float = 30.0
) -> Iterator[Sender]:
    sender: Sender = KIND[transport].open_sender(
        receivers=receivers, max_bytes=max_bytes, deadline_s=deadline_s
    )
    with closing(sender):
        yield sender
