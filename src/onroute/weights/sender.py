"""The sending end of a push between processes, whatever carries the bytes."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from onroute.core.errors import CheckError
from onroute.core.weights import TensorSpec, Transport, WeightOffer, WeightReceipt, WeightVersion
from onroute.weights.bucket import Bucket, buckets
from onroute.weights.checksum import Checksum
from onroute.weights.entrance import Entrance
from onroute.weights.line import Lines
from onroute.weights.messages import Done, End, Hello, Taken
from onroute.weights.rendezvous import Rendezvous


class OutgoingCourier(Protocol):
    """What carries the bytes of buckets to all receivers."""

    @property
    def transport(self) -> Transport: ...

    @property
    def in_flight(self) -> int:
        """How many buckets may be on their way before the oldest must be taken by all."""
        ...

    def listen(self, push: str, receivers: int) -> tuple[socket.socket, Rendezvous]: ...

    def begin(self, lines: Lines, hellos: Sequence[Hello]) -> None:
        """Welcome the receivers, ordered by index as `lines.all` is."""
        ...

    def carry(self, bucket: Bucket, lines: Lines) -> None:
        """Bring `bucket` on its way to all; its tensors are free afterwards."""
        ...

    def end(self, *, is_whole: bool) -> None:
        """The push is over; when it is not whole, nothing that it used can be trusted."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Push:
    """An open offer. `sending` is held by the thread that sends it."""

    rendezvous: Rendezvous
    listener: socket.socket
    stop: threading.Event = field(default_factory=threading.Event)
    sending: threading.Lock = field(default_factory=threading.Lock)


class Sender:
    """Offers weights to receivers in other processes and sends them.

    After a push that failed, the same object makes the next one. `abort` and `close` may be called
    from any thread, the rest from one at a time.
    """

    def __init__(
        self, courier: OutgoingCourier, *, receivers: int, max_bytes: int, deadline_s: float
    ) -> None:
        """deadline_s: longest single wait, for an engine to arrive or to take a bucket."""
        self._courier = courier
        self._receivers = receivers
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s
        self._open: dict[str, _Push] = {}

    def publish(
        self, version: WeightVersion, specs: Sequence[TensorSpec], *, receivers: int | None = None
    ) -> WeightOffer:
        """Open an offer of `specs`, which are all tensors that `send` will be given, in order.

        receivers: how many must take it, if not as many as when the sender was opened.
        """
        count = self._receivers if receivers is None else receivers
        listener, rendezvous = self._courier.listen(secrets.token_hex(8), count)
        self._open[str(rendezvous)] = _Push(rendezvous=rendezvous, listener=listener)
        return WeightOffer(
            transport=self._courier.transport,
            rendezvous=str(rendezvous),
            version=version,
            tensors=tuple(specs),
        )

    def send(self, offer: WeightOffer, units: Iterable[Mapping[str, torch.Tensor]]) -> WeightReceipt:
        """Wait for all receivers and send them `units`; return when all have taken the push whole.

        The tensors of a unit must keep their values until the next unit is asked for. An offer is
        sent once; whether it succeeds or not, it is closed afterwards.

        Raises:
            CheckError: the offer is not open; or a receiver refused what arrived, its own error.
            MachineError: a receiver died, gave up or was late, or the push was aborted.
        """
        push = self._open.get(offer.rendezvous)
        if push is None:
            raise CheckError(
                "weights-no-offer",
                f"offer {offer.transport}:{offer.rendezvous} of version {offer.version} is not open here",
                f"{len(self._open)} offer(s) are open at this sender",
                "publish again; an offer is sent once",
            )
        name = f"push {push.rendezvous.push} of version {offer.version}"
        lines = Lines(waiter="sender", push=name, deadline_s=self._deadline_s, stop=push.stop)
        with push.sending:
            try:
                entrance = Entrance(push.listener, push.rendezvous, deadline_s=self._deadline_s)
                self._courier.begin(lines, entrance.gather(lines))
                receipt = self._send_all(offer, units, lines)
            except BaseException as error:
                lines.close(error)
                self._courier.end(is_whole=False)
                raise
            else:
                lines.close()
                self._courier.end(is_whole=True)
            finally:
                self._forget(push)
        return receipt

    def abort(self, offer: WeightOffer) -> None:
        """End the push on both sides; fine when it is over already."""
        push = self._open.get(offer.rendezvous)
        if push is None:
            return
        push.stop.set()
        if push.sending.acquire(blocking=False):
            self._forget(push)
            push.sending.release()

    def close(self) -> None:
        """Abort what is open, wait for its end, and let go of everything."""
        for push in list(self._open.values()):
            push.stop.set()
            with push.sending:
                self._forget(push)
        self._courier.close()

    def _forget(self, push: _Push) -> None:
        self._open.pop(str(push.rendezvous), None)
        push.listener.close()

    def _send_all(
        self, offer: WeightOffer, units: Iterable[Mapping[str, torch.Tensor]], lines: Lines
    ) -> WeightReceipt:
        checksum = Checksum()
        waiting = 0
        for bucket in buckets(units, self._max_bytes, checksum):
            if waiting == self._courier.in_flight:
                _hear_taken(lines)
                waiting -= 1
            self._courier.carry(bucket, lines)
            waiting += 1
        lines.tell_all(End())
        for _ in range(waiting):
            _hear_taken(lines)
        for line in lines.all:
            lines.hear(line, "the end of the push", Done)
        return checksum.receipt(offer.version)


def _hear_taken(lines: Lines) -> None:
    for line in lines.all:
        lines.hear(line, "word that a bucket was taken", Taken)
