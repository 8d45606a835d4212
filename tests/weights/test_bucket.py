"""Buckets are bounded, keep units whole, and arrive as announced or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onroute.core.errors import CheckError
from onroute.core.weights import TensorSpec
from onroute.weights.bucket import Bucket, buckets, verified
from onroute.weights.checksum import Checksum, spec_of

Units = list[dict[str, torch.Tensor]]


def floats(count: int) -> torch.Tensor:
    return torch.arange(float(count))


def specs_of(units: Iterable[Mapping[str, torch.Tensor]]) -> list[TensorSpec]:
    return [spec_of(name, tensor) for unit in units for name, tensor in unit.items()]


def names(bucket: Bucket) -> list[str]:
    return [spec.name for spec in bucket.specs]


def test_units_fill_a_bucket_up_to_the_limit() -> None:
    # 4 + 4 + 8 bytes fit 16 exactly; the next 4 bytes open a new bucket.
    units: Units = [{"a": floats(1)}, {"b": floats(1)}, {"c": floats(2)}, {"d": floats(1)}]
    assert [names(b) for b in buckets(units, 16)] == [["a", "b", "c"], ["d"]]


def test_a_unit_is_never_split() -> None:
    # 8 bytes wait; gate and up together are 16, so both go into the next bucket though gate alone would fit.
    units: Units = [{"a": floats(2)}, {"gate": floats(2), "up": floats(2)}]
    assert [names(b) for b in buckets(units, 16)] == [["a"], ["gate", "up"]]


def test_a_unit_above_the_limit_travels_alone() -> None:
    units: Units = [{"a": floats(1)}, {"big": floats(100)}, {"b": floats(1)}]
    assert [names(b) for b in buckets(units, 16)] == [["a"], ["big"], ["b"]]


def test_one_small_tensor_in_a_bucket_of_a_gigabyte() -> None:
    (bucket,) = buckets([{"a": floats(3)}], 1 << 30)
    assert bucket.num_bytes == 12
    assert torch.equal(bucket.named()["a"], floats(3))


def test_no_units_make_no_bucket() -> None:
    assert list(buckets([], 16)) == []
    assert list(verified([], [])) == []


def test_strided_scalar_and_empty_tensors_arrive_equal_and_contiguous() -> None:
    w = floats(12).view(3, 4)
    unit = {
        "transposed": w.t(),
        "sliced": w[:, ::2],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bf16": w.bfloat16().t(),
        "int64": torch.arange(6)[::2],
        "bool": torch.tensor([True, False, True])[::2],
        "uint8": torch.arange(5, dtype=torch.uint8),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "parameter": torch.nn.Parameter(floats(3)),
    }
    (bucket,) = verified(buckets([unit], 1 << 20), specs_of([unit]))
    for name, tensor in bucket.named().items():
        assert torch.equal(tensor, unit[name])
        assert tensor.dtype == unit[name].dtype
        assert tensor.is_contiguous()
        assert not tensor.requires_grad


def test_units_are_pulled_only_as_buckets_are_asked_for() -> None:
    pulled: list[str] = []

    def units() -> Iterable[dict[str, torch.Tensor]]:
        for name in "abcd":
            pulled.append(name)
            yield {name: floats(1)}

    stream = buckets(units(), 4)
    next(stream)
    assert pulled == ["a", "b"]  # b shows that a's bucket is full


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=8), limit=st.integers(1, 64)
)
def test_nothing_is_lost_reordered_or_over_the_limit(sizes: list[list[int]], limit: int) -> None:
    units: Units = [{f"{i}.{j}": floats(n) for j, n in enumerate(unit)} for i, unit in enumerate(sizes)]
    checksum = Checksum()
    got = list(verified(buckets(units, limit, checksum), specs_of(units)))
    assert [name for bucket in got for name in names(bucket)] == [name for unit in units for name in unit]
    for bucket in got:
        units_within = {name.split(".")[0] for name in names(bucket)}
        assert bucket.num_bytes <= limit or len(units_within) == 1
    assert checksum.num_tensors == sum(map(len, sizes))
    assert checksum.value == (got[-1].checksum if got else 0)


def test_the_running_checksum_does_not_depend_on_the_bucket_size() -> None:
    units: Units = [{"a": floats(5)}, {"b": floats(7)}, {"c": floats(1)}]
    ends = {list(buckets(units, size))[-1].checksum for size in (1, 24, 1 << 30)}
    assert len(ends) == 1


def test_a_name_published_twice_is_refused() -> None:
    with pytest.raises(CheckError, match="tensor a;"):
        list(buckets([{"a": floats(1)}, {"a": floats(1)}], 64))


def three() -> tuple[list[Bucket], list[TensorSpec]]:
    units: Units = [{"a": floats(2)}, {"b": floats(2)}, {"c": floats(2)}]
    return list(buckets(units, 8)), specs_of(units)


def test_a_flipped_byte_is_refused_with_its_bucket_named() -> None:
    sent, specs = three()
    sent[1].tensors[0].view(torch.uint8)[3] ^= 1
    with pytest.raises(CheckError, match=r"weights-checksum.*tensor b to b"):
        list(verified(sent, specs))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 2], r"c float32 \[2\] arrived where the offer has b float32"),
        ([1, 0, 2], r"b float32 \[2\] arrived where the offer has a float32"),
        ([0, 0, 1, 2], r"a float32 \[2\] arrived where the offer has b float32"),
        ([0, 1], r"2 of 3 offered tensors arrived; the next would be tensor c"),
        ([], r"0 of 3 offered tensors arrived; the next would be tensor a"),
    ],
    ids=["lost", "swapped", "repeated", "cut short", "nothing"],
)
def test_lost_swapped_and_repeated_buckets_are_refused_by_tensor_name(order: list[int], message: str) -> None:
    sent, specs = three()
    with pytest.raises(CheckError, match=message):
        list(verified([sent[i] for i in order], specs))


def test_more_tensors_than_offered_are_refused() -> None:
    sent, specs = three()
    with pytest.raises(CheckError, match=r"weights-extra.*tensor c"):
        list(verified(sent, specs[:2]))


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"shape": (1, 2)}, {"name": "x"}], ids=str)
def test_another_name_dtype_or_shape_than_offered_is_refused(change: dict[str, str]) -> None:
    sent, specs = three()
    specs[1] = replace(specs[1], **change)  # type: ignore[arg-type]
    with pytest.raises(CheckError, match=r"weights-unexpected.*b float32 \[2\] arrived.*tensor 1 of 3"):
        list(verified(sent, specs))


def test_a_tensor_that_is_not_what_its_bucket_says_is_refused() -> None:
    sent, specs = three()
    sent[0] = replace(sent[0], tensors=(floats(3),))
    with pytest.raises(CheckError, match=r"weights-unexpected.*a float32 \[3\] arrived"):
        list(verified(sent, specs))
