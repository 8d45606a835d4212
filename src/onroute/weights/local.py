"""The transport inside one process: the receiver pulls straight from the sender's tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from onroute.core.errors import CheckError
from onroute.core.weights import TensorSpec, WeightOffer, WeightReceipt, WeightVersion
from onroute.weights.bucket import Bucket, buckets, verified
from onroute.weights.checksum import Checksum

UnitsFactory: TypeAlias = Callable[[], Iterable[Mapping[str, torch.Tensor]]]


class LocalExchange:
    """Where a sender and receivers of one process meet.

    An offer is open from `publish` until `finish`, `withdraw`, or a receiver that failed or gave
    up; several receivers may take it, one after the other. Only one bucket is in flight at a time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._open: dict[str, UnitsFactory] = {}
        self._sent: dict[str, WeightReceipt] = {}
        self._count = 0

    def publish(
        self, version: WeightVersion, specs: Sequence[TensorSpec], units_factory: UnitsFactory
    ) -> WeightOffer:
        """Open an offer of `specs`, which are all tensors of all units in order.

        `units_factory` is called once per receiver. The tensors of a unit must keep their values
        until the next bucket is asked for.
        """
        rendezvous = f"push-{self._count}"
        self._count += 1
        self._open[rendezvous] = units_factory
        return WeightOffer(transport="local", rendezvous=rendezvous, version=version, tensors=tuple(specs))

    def receive(self, offer: WeightOffer) -> Generator[Bucket, None, None]:
        """The verified buckets of `offer`. A receiver that fails or stops early ends the offer.

        Raises:
            CheckError: when the offer is not open, or whatever arrives differs from it.
        """
        units_factory = self._open.get(offer.rendezvous)
        if offer.transport != "local" or units_factory is None:
            raise CheckError(
                "weights-no-offer",
                f"offer {offer.transport}:{offer.rendezvous} of version {offer.version} is not open here",
                f"{len(self._open)} offer(s) are open in this process",
                "publish again and receive before the offer is finished",
            )
        self._sent.pop(offer.rendezvous, None)
        sent = Checksum()
        try:
            yield from verified(buckets(units_factory(), self._max_bytes, sent), offer.tensors)
        except BaseException:
            self.withdraw(offer)
            raise
        self._sent[offer.rendezvous] = sent.receipt(offer.version)

    def finish(self, offer: WeightOffer) -> WeightReceipt:
        """Close the offer and say what was sent, as counted by the sender.

        Raises:
            CheckError: when no receiver took the offer whole.
        """
        receipt = self._sent.get(offer.rendezvous)
        self.withdraw(offer)
        if receipt is None:
            raise CheckError(
                "weights-not-taken",
                f"no receiver took version {offer.version} whole",
                f"offer {offer.rendezvous} of {len(offer.tensors)} tensors",
                "let every engine update before the offer is finished",
            )
        return receipt

    def withdraw(self, offer: WeightOffer) -> None:
        """Close the offer and let go of the sender's tensors; closing twice is fine."""
        self._open.pop(offer.rendezvous, None)
        self._sent.pop(offer.rendezvous, None)
