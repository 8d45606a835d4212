"""The transport on one host: buckets lie in memory that both processes see.

The blocks are anonymous files, handed over the line of the push. They have no name, so that a process that
dies leaves none behind, and the size of /dev/shm is no limit; the kernel frees a block with its last user.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence

import torch

from onroute.core.errors import CheckError, MachineError
from onroute.core.weights import Transport
from onroute.weights.bucket import Bucket
from onroute.weights.line import Lines
from onroute.weights.messages import Header, Hello, Welcome
from onroute.weights.payload import pack, payload_bytes, unpack
from onroute.weights.receiver import Receiver
from onroute.weights.rendezvous import Rendezvous, listen_unix
from onroute.weights.sender import Sender

NUM_SLOTS = 2
"""While receivers read one block, the sender fills the other."""


def open_sender(*, receivers: int, max_bytes: int, deadline_s: float = 300.0) -> Sender:
    """max_bytes: size of a bucket; up to two of them exist at a time. See `Sender`."""
    return Sender(_Outgoing(), receivers=receivers, max_bytes=max_bytes, deadline_s=deadline_s)


def open_receiver(index: int, *, deadline_s: float = 300.0) -> Receiver:
    """The receiver with this index; it must run on the sender's host. See `Receiver`."""
    return Receiver(_Incoming(), index=index, deadline_s=deadline_s)


class _Outgoing:
    transport: Transport = "shared_memory"
    in_flight = NUM_SLOTS

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor | None] = [None] * NUM_SLOTS
        self._count = 0

    def listen(self, push: str, receivers: int) -> tuple[socket.socket, Rendezvous]:
        return listen_unix(push, receivers)

    def begin(self, lines: Lines, hellos: Sequence[Hello]) -> None:
        self._count = 0
        lines.tell_all(Welcome(group="", store_port=0))

    def carry(self, bucket: Bucket, lines: Lines) -> None:
        slot = self._count % NUM_SLOTS
        self._count += 1
        needed = payload_bytes(bucket.specs)
        block = self._blocks[slot]
        if block is not None and block.numel() >= needed:
            pack(bucket.tensors, block)
            lines.tell_all(Header(specs=bucket.specs, checksum=bucket.checksum, slot=slot))
            return
        file = _anonymous_file(max(needed, 1))
        try:
            block = self._blocks[slot] = _mapped(file, max(needed, 1))
            pack(bucket.tensors, block)
            header = Header(
                specs=bucket.specs, checksum=bucket.checksum, slot=slot, new_block_bytes=block.numel()
            )
            for line in lines.all:
                lines.tell(line, header, files=[file])
        finally:
            os.close(file)

    def end(self, *, is_whole: bool) -> None:
        self._blocks = [None] * NUM_SLOTS

    def close(self) -> None:
        self._blocks = [None] * NUM_SLOTS


class _Incoming:
    transport: Transport = "shared_memory"
    group = ""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor | None] = [None] * NUM_SLOTS

    def begin(self, lines: Lines, welcome: Welcome, rendezvous: Rendezvous) -> None:
        self._blocks = [None] * NUM_SLOTS

    def fetch(self, header: Header, lines: Lines) -> tuple[torch.Tensor, ...]:
        if header.new_block_bytes:
            file = lines.all[0].files.popleft()
            try:
                self._blocks[header.slot] = _mapped(file, header.new_block_bytes)
            finally:
                os.close(file)
        block = self._blocks[header.slot]
        if block is None or block.numel() < payload_bytes(header.specs):
            raise CheckError(
                "weights-block",
                f"a bucket of {payload_bytes(header.specs)} bytes was announced in a block that is too small",
                f"slot {header.slot}, tensor {header.specs[0].name}",
                "run the same version of onroute on both sides",
            )
        return unpack(header.specs, block)

    def end(self, *, is_whole: bool) -> None:
        self._blocks = [None] * NUM_SLOTS

    def close(self) -> None:
        self._blocks = [None] * NUM_SLOTS


def _anonymous_file(num_bytes: int) -> int:
    try:
        file = os.memfd_create("onroute-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, num_bytes)
        except OSError:
            os.close(file)
            raise
    except (AttributeError, OSError) as error:
        raise MachineError(
            "weights-shared-memory",
            f"no shared memory of {num_bytes} bytes: {error}",
            "the sender's host",
            "free memory or lower the bucket size; where the system has no memfd (not Linux), use broadcast",
        ) from error
    return file


def _mapped(file: int, num_bytes: int) -> torch.Tensor:
    """The file's bytes as uint8 [num_bytes]; unmapped when the last view of them is gone."""
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
