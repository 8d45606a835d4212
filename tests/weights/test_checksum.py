"""The checksum sees values, names, dtypes, shapes and order, and nothing else."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch

from onroute.core.errors import CheckError
from onroute.core.weights import WeightReceipt
from onroute.weights.checksum import Checksum, check_receipt, spec_of


def of(*named: tuple[str, torch.Tensor]) -> int:
    checksum = Checksum()
    for name, tensor in named:
        checksum.add(name, tensor)
    return checksum.value


def test_it_is_the_crc_of_a_header_and_the_raw_bytes() -> None:
    # float32 1.0 is 00 00 80 3f in memory.
    assert of(("w", torch.tensor([1.0]))) == zlib.crc32(b"w\0float32\0(1,)\0" + bytes([0, 0, 0x80, 0x3F]))


def test_strides_do_not_count_but_values_do() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert of(("w", matrix.t())) == of(("w", matrix.t().contiguous()))
    assert of(("w", matrix.t())) != of(("w", matrix.reshape(3, 2)))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("v", torch.zeros(4)),
        ("w", torch.zeros(2, 2)),
        ("w", torch.zeros(4, dtype=torch.int32)),
        ("w", torch.tensor([0.0, 0.0, 0.0, -0.0])),
    ],
    ids=["name", "shape", "dtype", "one bit"],
)
def test_every_difference_shows(name: str, tensor: torch.Tensor) -> None:
    assert of((name, tensor)) != of(("w", torch.zeros(4)))


def test_order_counts() -> None:
    a, b = ("a", torch.ones(2)), ("b", torch.ones(2))
    assert of(a, b) != of(b, a)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.uint8),
        torch.ones(3, requires_grad=True),
    ],
    ids=["0-d", "empty", "bfloat16", "int64", "bool", "uint8", "requires grad"],
)
def test_every_kind_of_tensor_can_be_added(tensor: torch.Tensor) -> None:
    checksum = Checksum()
    checksum.add("t", tensor)
    assert checksum.num_bytes == tensor.nbytes
    assert checksum.num_tensors == 1


def test_a_spec_names_the_dtype_without_the_module() -> None:
    spec = spec_of("w", torch.zeros(2, 3, dtype=torch.bfloat16))
    assert (spec.name, spec.dtype, spec.shape) == ("w", "bfloat16", (2, 3))


def test_receipts_that_differ_in_any_field_are_refused() -> None:
    sent = WeightReceipt(version=3, num_tensors=2, num_bytes=16, checksum=7)
    check_receipt(sent, sent, engine="0")
    for other in (
        replace(sent, version=2),
        replace(sent, num_tensors=1),
        replace(sent, num_bytes=8),
        replace(sent, checksum=8),
    ):
        with pytest.raises(CheckError, match=r"weights-receipt.*engine 0"):
            check_receipt(sent, other, engine="0")
