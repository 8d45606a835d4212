"""The receiving end of a push between processes, whatever carries the bytes."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from typing import Protocol

import torch

from onroute.core.errors import CheckError
from onroute.core.weights import Transport, WeightOffer
from onroute.weights.bucket import Bucket, verified
from onroute.weights.line import Line, Lines
from onroute.weights.messages import Done, End, Header, Hello, Taken, Welcome
from onroute.weights.rendezvous import Rendezvous, connect


class IncomingCourier(Protocol):
    """What brings the bytes of buckets to one receiver."""

    @property
    def transport(self) -> Transport: ...

    @property
    def group(self) -> str:
        """Name of the process group that is kept from an earlier push, or ""."""
        ...

    def begin(self, lines: Lines, welcome: Welcome, rendezvous: Rendezvous) -> None: ...

    def fetch(self, header: Header, lines: Lines) -> tuple[torch.Tensor, ...]:
        """The bucket's tensors; they keep their values until the next is fetched."""
        ...

    def end(self, *, is_whole: bool) -> None:
        """The push is over; when it is not whole, nothing that it used can be trusted."""
        ...

    def close(self) -> None: ...


class Receiver:
    """Takes pushes from a `Sender` in another process; a `BucketSource`.

    After a push that failed, the same object takes the next one.
    """

    def __init__(self, courier: IncomingCourier, *, index: int, deadline_s: float) -> None:
        """index: which of the receivers this is, from 0. deadline_s: longest single wait."""
        self._courier = courier
        self._index = index
        self._deadline_s = deadline_s
        self._stop = threading.Event()

    def receive(self, offer: WeightOffer) -> Generator[Bucket, None, None]:
        """The verified buckets of `offer`; a bucket's tensors keep their values until the next is asked for.

        Whoever stops early closes the generator: that ends the push for the sender too.

        Raises:
            CheckError: whatever arrives differs from the offer; the sender is told.
            MachineError: the sender is not there, died, was late, or ended the push.
        """
        if offer.transport != self._courier.transport:
            raise CheckError(
                "weights-no-offer",
                f"an offer by {offer.transport} came to a receiver by {self._courier.transport}",
                f"receiver {self._index}, version {offer.version}",
                "open both ends of the same transport",
            )
        rendezvous = Rendezvous.parse(offer.rendezvous)
        lines = Lines(
            waiter=f"receiver {self._index}",
            push=f"push {rendezvous.push} of version {offer.version}",
            deadline_s=self._deadline_s,
            stop=self._stop,
        )
        connection = connect(rendezvous, deadline_s=self._deadline_s)
        line = Line(connection, "the sender", deadline_s=self._deadline_s)
        lines.all.append(line)
        try:
            hello = Hello(push=rendezvous.push, receiver=self._index, group=self._courier.group)
            lines.tell(line, hello)
            welcome = lines.hear(line, "its welcome", Welcome)
            self._courier.begin(lines, welcome, rendezvous)
            yield from verified(self._arriving(lines, line), offer.tensors)
            lines.tell(line, Done())
        except BaseException as error:
            lines.close(error)
            self._courier.end(is_whole=False)
            raise
        else:
            lines.close()
            self._courier.end(is_whole=True)

    def _arriving(self, lines: Lines, line: Line) -> Iterator[Bucket]:
        while True:
            message = lines.hear(line, "the next bucket", Header, End)
            if not isinstance(message, Header):
                return
            tensors = self._courier.fetch(message, lines)
            yield Bucket(specs=message.specs, tensors=tensors, checksum=message.checksum)
            lines.tell(line, Taken())

    def close(self) -> None:
        """End what is being received, from whatever thread, and let go of everything."""
        self._stop.set()
        self._courier.close()
