"""The transport between hosts: one broadcast per bucket in a process group of sender and receivers.

The group is built straight from a backend over a store of the sender's own, because the trainer's process
has a default group already and must keep it. It is kept between pushes and built anew after a failure or when
a receiver is new. Nobody enters a collective before all others said that they are ready for it.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from onroute.core.errors import MachineError
from onroute.core.weights import Transport
from onroute.weights.bucket import Bucket
from onroute.weights.line import Lines
from onroute.weights.messages import Header, Hello, Welcome
from onroute.weights.payload import pack, payload_bytes, unpack
from onroute.weights.receiver import Receiver
from onroute.weights.rendezvous import Rendezvous, listen_tcp
from onroute.weights.sender import Sender

POLL_S = 0.001
"""A collective gives no sign when it is done, so it is looked at this often."""

CPU = torch.device("cpu")


def open_sender(
    *,
    receivers: int,
    max_bytes: int,
    host: str = "127.0.0.1",
    device: torch.device = CPU,
    deadline_s: float = 300.0,
) -> Sender:
    """See `Sender`.

    host: the address of this host that receivers can reach; the only interface listened to. gloo picks
        its own, by host name or GLOO_SOCKET_IFNAME.
    device: where buckets travel from: NCCL for a CUDA device, gloo for the CPU.
    """
    courier = _Outgoing(host, device, deadline_s)
    return Sender(courier, receivers=receivers, max_bytes=max_bytes, deadline_s=deadline_s)


def open_receiver(index: int, *, device: torch.device = CPU, deadline_s: float = 300.0) -> Receiver:
    """The receiver with this index; tensors arrive on `device`, of the sender's kind. See `Receiver`."""
    return Receiver(_Incoming(index, device, deadline_s), index=index, deadline_s=deadline_s)


DESTROY_S = 1.0
"""Enough to leave a group in which nothing hangs; a thread that still does so at exit would crash it."""


class Backend(Protocol):
    """What is used of ProcessGroupGloo and ProcessGroupNCCL."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work: ...

    def abort(self) -> None: ...


class _Group:
    """A process group that this side is a member of, or none. Rank 0 sends."""

    def __init__(self, device: torch.device, deadline_s: float) -> None:
        self.device = device
        self.name = ""
        self.size = 0
        self._deadline_s = deadline_s
        self._backend: Backend | None = None

    def build(
        self, name: str, open_store: Callable[[], TCPStore], rank: int, size: int, lines: Lines
    ) -> None:
        """Meet the other members under `name`; a member that dies meanwhile is noticed."""
        self.drop()
        built: list[Backend | Exception] = []

        def meet() -> None:
            try:
                backend = self._new_backend(PrefixStore(name, open_store()), rank, size)
                # NCCL connects in its first collective only.
                backend.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), 0).wait()
                built.append(backend)
            except Exception as error:
                built.append(error)

        threading.Thread(target=meet, name="weights-group", daemon=True).start()
        lines.watch("the process group to form", lambda: bool(built), poll_s=POLL_S)
        if isinstance(answer := built.pop(), Exception):
            raise _failed("forming the process group", answer) from answer
        self._backend, self.name, self.size = answer, name, size

    def _new_backend(self, store: PrefixStore, rank: int, size: int) -> Backend:
        timeout = timedelta(seconds=self._deadline_s)
        if self.device.type == "cpu":
            return dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[return-value]
        return dist.ProcessGroupNCCL(store, rank, size, timeout)  # type: ignore[return-value, arg-type]

    def broadcast(self, payload: torch.Tensor, what: str, lines: Lines) -> None:
        """`payload` of rank 0 is in `payload` of all afterwards."""
        if payload.numel() == 0:
            return
        backend = self._backend
        if backend is None:
            raise _failed(what, RuntimeError("this end was closed"))
        try:
            work = backend.broadcast(payload, 0)
            lines.watch(what, work.is_completed, poll_s=POLL_S)
            work.wait()
        except RuntimeError as error:
            # The collective fails a moment before the line says who died.
            lines.look(0.5, what)
            raise _failed(what, error) from error

    def drop(self) -> None:
        """Leave the group. The destructor waits for the group's collectives, so it is given a thread: where a
        peer hangs in one, nobody waits until the deadline for that."""
        if self._backend is None:
            return
        remains = [self._backend]
        self._backend, self.name, self.size = None, "", 0
        end = threading.Thread(target=_destroy, args=(remains,), name="weights-group-end", daemon=True)
        end.start()
        end.join(DESTROY_S)


def _destroy(remains: list[Backend]) -> None:
    remains[0].abort()
    remains.clear()


def _failed(what: str, error: Exception) -> MachineError:
    return MachineError(
        "weights-transfer",
        f"{what} failed: {str(error).splitlines()[0]}",
        "the process group of sender and receivers",
        "see whether all engines run and reach each other, then push again",
    )


class _Outgoing:
    transport: Transport = "broadcast"
    in_flight = 1

    def __init__(self, host: str, device: torch.device, deadline_s: float) -> None:
        self._host = host
        self._group = _Group(device, deadline_s)
        self._store: TCPStore | None = None

    def listen(self, push: str, receivers: int) -> tuple[socket.socket, Rendezvous]:
        return listen_tcp(self._host, push, receivers)

    def begin(self, lines: Lines, hellos: Sequence[Hello]) -> None:
        size = len(hellos) + 1
        store = self._open_store()
        is_kept = self._group.size == size and all(hello.group == self._group.name for hello in hellos)
        name = self._group.name if is_kept else secrets.token_hex(8)
        lines.tell_all(Welcome(group=name, store_port=store.port))
        if not is_kept:
            self._group.build(name, lambda: store, 0, size, lines)

    def _open_store(self) -> TCPStore:
        if self._store is None:
            listener, place = listen_tcp(self._host, "store", 1)
            # Given a socket, the store listens on this interface alone instead of on all.
            self._store = TCPStore(
                place.host,
                place.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return self._store

    def carry(self, bucket: Bucket, lines: Lines) -> None:
        payload = torch.empty(payload_bytes(bucket.specs), dtype=torch.uint8, device=self._group.device)
        pack(bucket.tensors, payload)
        lines.tell_all(Header(specs=bucket.specs, checksum=bucket.checksum))
        self._group.broadcast(payload, "a bucket to reach all receivers", lines)

    def end(self, *, is_whole: bool) -> None:
        if not is_whole:
            self._group.drop()

    def close(self) -> None:
        self._group.drop()
        self._store = None


class _Incoming:
    transport: Transport = "broadcast"

    def __init__(self, index: int, device: torch.device, deadline_s: float) -> None:
        self._index = index
        self._group = _Group(device, deadline_s)
        self._deadline_s = deadline_s

    @property
    def group(self) -> str:
        return self._group.name

    def begin(self, lines: Lines, welcome: Welcome, rendezvous: Rendezvous) -> None:
        if welcome.group == self._group.name:
            return
        timeout = timedelta(seconds=self._deadline_s)

        def open_store() -> TCPStore:
            return TCPStore(rendezvous.host, welcome.store_port, is_master=False, timeout=timeout)

        size = rendezvous.receivers + 1
        self._group.build(welcome.group, open_store, self._index + 1, size, lines)

    def fetch(self, header: Header, lines: Lines) -> tuple[torch.Tensor, ...]:
        payload = torch.empty(payload_bytes(header.specs), dtype=torch.uint8, device=self._group.device)
        self._group.broadcast(payload, "a bucket", lines)
        return unpack(header.specs, payload)

    def end(self, *, is_whole: bool) -> None:
        if not is_whole:
            self._group.drop()

    def close(self) -> None:
        self._group.drop()
