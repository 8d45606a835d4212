"""Tensors of any dtype and shape are one run of bytes and back."""

from __future__ import annotations

import pytest
import torch

from onroute.weights.checksum import spec_of
from onroute.weights.payload import pack, payload_bytes, unpack


def test_a_payload_pads_every_tensor_to_sixteen_bytes() -> None:
    # 3 bools, 5 bfloat16, 4 float32, nothing: 3 -> 16, 10 -> 16, 16 -> 16, 0 -> 0.
    tensors = [
        torch.ones(3, dtype=torch.bool),
        torch.ones(5, dtype=torch.bfloat16),
        torch.ones(4),
        torch.ones(0, 4),
    ]
    assert payload_bytes([spec_of("w", tensor) for tensor in tensors]) == 48


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int64,
        torch.complex64,
    ],
)
def test_tensors_come_back_bitwise_as_views_of_the_payload(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2, (3, 5), generator=torch.Generator().manual_seed(1))
    tensors = [bits.to(dtype), bits[0, 0].to(dtype), torch.empty(2, 0, 3, dtype=dtype), bits[:1].to(dtype)]
    specs = [spec_of(f"w{index}", tensor) for index, tensor in enumerate(tensors)]
    payload = torch.full((payload_bytes(specs),), 255, dtype=torch.uint8)
    pack(tensors, payload)
    for before, after in zip(tensors, unpack(specs, payload), strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert torch.equal(after.view(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8))
        assert after.untyped_storage().data_ptr() == payload.untyped_storage().data_ptr()
