"""A bucket's tensors as one run of bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from onroute.core.weights import TensorSpec

ALIGNMENT = 16
"""Every tensor starts at a multiple of it, so that its bytes can be viewed as any dtype."""


def payload_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(_padded(_num_bytes(spec)) for spec in specs)


def pack(tensors: Sequence[torch.Tensor], payload: torch.Tensor) -> None:
    """Write contiguous `tensors` one after the other into `payload`, uint8 [payload_bytes]."""
    start = 0
    for tensor in tensors:
        raw = tensor.reshape(-1).view(torch.uint8)
        payload[start : start + raw.numel()].copy_(raw)
        start += _padded(raw.numel())


def unpack(specs: Sequence[TensorSpec], payload: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in `payload`, as views of it."""
    tensors = []
    start = 0
    for spec in specs:
        end = start + _num_bytes(spec)
        tensors.append(payload[start:end].view(_dtype(spec)).view(spec.shape))
        start += _padded(end - start)
    return tuple(tensors)


def _num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _dtype(spec).itemsize


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
