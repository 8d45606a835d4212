"""Cuts the stream of published tensors into buckets of bounded size, and checks it on arrival."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from onroute.core.errors import CheckError
from onroute.core.weights import TensorSpec, WeightOffer
from onroute.weights.checksum import Checksum, spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Some tensors of a push that travel together.

    specs, tensors: equally long, in the order of the offer; every tensor is contiguous.
    checksum: the running checksum after the last tensor of this bucket, so that a lost, repeated
        or reordered bucket shows as well as a changed byte.
    """

    specs: tuple[TensorSpec, ...]
    tensors: tuple[torch.Tensor, ...]
    checksum: int

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors by their published names, in order."""
        return {spec.name: tensor for spec, tensor in zip(self.specs, self.tensors, strict=True)}


class BucketSource(Protocol):
    """The receiving end of a transport."""

    def receive(self, offer: WeightOffer) -> Generator[Bucket, None, None]:
        """The buckets of `offer`, verified, in order. A bucket's tensors keep their values until the next
        is asked for; close the generator to stop early."""
        ...


def buckets(
    units: Iterable[Mapping[str, torch.Tensor]], max_bytes: int, checksum: Checksum | None = None
) -> Iterator[Bucket]:
    """Fill buckets with whole units, in order, up to `max_bytes` each.

    A unit is all published tensors that come from one model parameter. It is never split, so that
    the receiver can turn every bucket back into whole parameters; a unit above the limit travels
    alone. `checksum` is added to; pass one to read the sender's own receipt afterwards.
    """
    checksum = Checksum() if checksum is None else checksum
    waiting: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for unit in units:
        unit_bytes = sum(tensor.nbytes for tensor in unit.values())
        if waiting and num_bytes + unit_bytes > max_bytes:
            yield _seal(waiting, checksum)
            waiting, num_bytes = {}, 0
        if repeated := waiting.keys() & unit.keys():
            raise CheckError(
                "weights-repeated",
                f"{len(repeated)} tensor(s) are published twice",
                f"tensor {min(repeated)}",
                "publish every name once",
            )
        waiting.update({name: tensor.detach().contiguous() for name, tensor in unit.items()})
        num_bytes += unit_bytes
    if waiting:
        yield _seal(waiting, checksum)


def _seal(tensors: Mapping[str, torch.Tensor], checksum: Checksum) -> Bucket:
    for name, tensor in tensors.items():
        checksum.add(name, tensor)
    return Bucket(
        specs=tuple(spec_of(name, tensor) for name, tensor in tensors.items()),
        tensors=tuple(tensors.values()),
        checksum=checksum.value,
    )


def verified(arriving: Iterable[Bucket], expected: Sequence[TensorSpec]) -> Iterator[Bucket]:
    """Hand on buckets that are what the offer announced.

    Raises:
        CheckError: at the first tensor that is missing, extra, out of order, of another dtype or
            shape, or in a bucket whose bytes differ from its checksum.
    """
    checksum = Checksum()
    for bucket in arriving:
        for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True):
            _check_tensor(spec, tensor, expected, checksum.num_tensors)
            checksum.add(spec.name, tensor)
        if checksum.value != bucket.checksum:
            raise CheckError(
                "weights-checksum",
                f"checksum {checksum.value:08x} arrived where {bucket.checksum:08x} was sent",
                f"bucket from tensor {bucket.specs[0].name} to {bucket.specs[-1].name}",
                "push again; if it repeats, the transport or the memory corrupts data",
            )
        yield bucket
    if checksum.num_tensors < len(expected):
        raise CheckError(
            "weights-missing",
            f"{checksum.num_tensors} of {len(expected)} offered tensors arrived",
            f"the next would be tensor {expected[checksum.num_tensors].name}",
            "push again; the sender ended early",
        )


def _check_tensor(spec: TensorSpec, tensor: torch.Tensor, expected: Sequence[TensorSpec], index: int) -> None:
    if index >= len(expected):
        raise CheckError(
            "weights-extra",
            f"more tensors arrived than the {len(expected)} offered",
            f"tensor {spec.name}",
            "offer exactly what is published",
        )
    actual = spec_of(spec.name, tensor)
    if spec != expected[index] or actual != spec:
        raise CheckError(
            "weights-unexpected",
            f"{actual.name} {actual.dtype} {list(actual.shape)} arrived where the offer has "
            f"{expected[index].name} {expected[index].dtype} {list(expected[index].shape)}",
            f"tensor {index} of {len(expected)}",
            "publish in the order, dtype and shape of the offer",
        )
