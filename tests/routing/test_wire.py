"""An engine's rows over all decoder layers become a trace, or are refused with the place of the fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.routing.wire import trace_from_engine_rows


def convert(rows: NDArray[Any], num_tokens: int = 4, num_experts: int = 8) -> RoutingTrace:
    """Layers 1 and 3 of four decoder layers route."""
    return trace_from_engine_rows(
        rows, num_tokens=num_tokens, layers=(1, 3), num_experts=num_experts, sample_id="p1/0"
    )


def engine_rows(num_rows: int, dtype: Any = np.int32) -> NDArray[Any]:
    """Row r, layer l: experts [r, l + 4]."""
    rows = np.zeros((num_rows, 4, 2), dtype=dtype)
    rows[..., 0] = np.arange(num_rows)[:, None]
    rows[..., 1] = np.arange(4) + 4
    return rows


@pytest.mark.parametrize("num_rows", [3, 4], ids=["T-1", "with the stop-edge row"])
def test_columns_of_dense_layers_and_the_extra_row_are_dropped(num_rows: int):
    trace = convert(engine_rows(num_rows))
    assert trace.layers == (1, 3)
    assert trace.experts.dtype == np.uint8
    assert trace.experts[:3].tolist() == [[[r, 5], [r, 7]] for r in range(3)]
    assert trace.valid.tolist() == [True, True, True, False]


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_the_smallest_type_that_holds_every_id_is_used(num_experts: int, dtype: type):
    rows = engine_rows(3)
    rows[2, 3] = [num_experts - 1, 0]
    trace = convert(rows, num_experts=num_experts)
    assert trace.experts.dtype == dtype
    assert trace.experts[2, 1].tolist() == [num_experts - 1, 0]


def test_a_trace_of_4096_tokens_takes_a_byte_per_choice():
    rows = np.zeros((4095, 48, 8), dtype=np.int64)
    trace = trace_from_engine_rows(rows, num_tokens=4096, layers=range(48), num_experts=128, sample_id="s")
    assert trace.num_bytes == 4096 * 48 * 8


def test_marks_in_dense_columns_are_not_looked_at():
    rows = engine_rows(3)
    rows[:, [0, 2]] = -1
    convert(rows)


@pytest.mark.parametrize("bad", [-1, -2, 8, 300])
def test_an_id_out_of_range_is_refused_before_it_could_wrap(bad: int):
    rows = engine_rows(3)
    rows[2, 3, 1] = bad
    with pytest.raises(
        CheckError, match=rf"id {bad} is not in 0..7 \(1 such ids\); sample p1/0, layer 3, position 2"
    ):
        convert(rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (engine_rows(2), r"routing-rows.*2 route rows for 4 tokens, expected 3"),
        (engine_rows(5), r"routing-rows.*5 route rows for 4 tokens"),
        (engine_rows(3, np.float32), r"routing-dtype.*float32"),
        (engine_rows(3)[:, :3], r"routing-layers.*cover 3 decoder layers.*up to layer 3"),
        (engine_rows(3)[:, 0], r"routing-shape.*2 dimensions"),
    ],
)
def test_another_form_is_refused_with_both_numbers(rows: NDArray[Any], message: str):
    with pytest.raises(CheckError, match=message):
        convert(rows)
