"""A checksum that runs over every tensor of a push, in order."""

from __future__ import annotations

import zlib

import torch

from onroute.core.errors import CheckError
from onroute.core.weights import TensorSpec, WeightReceipt, WeightVersion


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What `tensor` is called on the wire."""
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


class Checksum:
    """CRC-32 over name, dtype, shape and bytes of the tensors added so far; strides do not count."""

    def __init__(self) -> None:
        self.value = 0
        self.num_tensors = 0
        self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        spec = spec_of(name, tensor)
        header = f"{spec.name}\0{spec.dtype}\0{spec.shape}\0".encode()
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        self.value = zlib.crc32(raw.data, zlib.crc32(header, self.value))
        self.num_tensors += 1
        self.num_bytes += raw.nbytes

    def receipt(self, version: WeightVersion) -> WeightReceipt:
        """What has been added, as the answer to a push of `version`."""
        return WeightReceipt(
            version=version, num_tensors=self.num_tensors, num_bytes=self.num_bytes, checksum=self.value
        )


def check_receipt(sent: WeightReceipt, received: WeightReceipt, *, engine: str) -> None:
    """Refuse an engine that holds something else than what was sent.

    Raises:
        CheckError: when any field differs; both receipts are shown.
    """
    if sent != received:
        raise CheckError(
            "weights-receipt",
            f"sent version {sent.version}: {sent.num_tensors} tensors, {sent.num_bytes} bytes, "
            f"checksum {sent.checksum:08x}; the engine holds version {received.version}: "
            f"{received.num_tensors} tensors, {received.num_bytes} bytes, checksum {received.checksum:08x}",
            f"engine {engine}",
            "push the weights again before sampling",
        )
