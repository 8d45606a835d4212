"""The words in which weights travel from the trainer to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

WeightVersion: TypeAlias = int
"""Counts pushes: 0 is the model as loaded, +1 with every push. Never goes back within a run."""

Transport: TypeAlias = Literal["local", "disk", "broadcast", "shared_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor under the name it has in the model's published safetensors layout.

    `dtype` is torch's name without the module, e.g. "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOffer:
    """Announces one push. Serialisable: the tensors themselves go through the transport.

    rendezvous: where the receiver finds the sender, in the transport's own terms.
    tensors: everything that will arrive, in order. Which of them share a bucket, and each
        bucket's checksum, travel with the bucket.
    """

    transport: Transport
    rendezvous: str
    version: WeightVersion
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """The receiver's answer: what it now holds. `checksum` runs over all buckets in order."""

    version: WeightVersion
    num_tensors: int
    num_bytes: int
    checksum: int
