"""A trace that cannot be the route of its tokens is refused on arrival, with what and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.routing.sites import RoutingMap
from onroute.routing.validation import validate_trace
from tests.routing.builders import flat_map, random_trace

MODEL = flat_map([0, 1, 2, 3])  # 8 experts, top 2


def validate(trace: RoutingTrace, model: RoutingMap = MODEL, **changes: Any) -> None:
    expected: dict[str, Any] = {
        "num_tokens": trace.num_tokens,
        "layers": model.layers,
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "sample_id": "p7/2",
    }
    validate_trace(trace, **{**expected, **changes})


def good(num_tokens: int = 12) -> RoutingTrace:
    return random_trace(MODEL, num_tokens)


def with_ids(position: int, column: int, ids: list[int], dtype: Any = np.uint8) -> RoutingTrace:
    trace = replace(good(), experts=good().experts.astype(dtype))
    trace.experts[position, column] = ids
    return trace


@pytest.mark.parametrize("num_tokens", [1, 2, 12, 500])
def test_natural_traces_pass(num_tokens: int):
    validate(random_trace(MODEL, num_tokens))


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (
            random_trace(flat_map([0, 1, 2]), 12),
            r"routing-layers.*3 layers \(0, 1, 2\).*in 4: \(0, 1, 2, 3\)",
        ),
        (random_trace(flat_map(range(5)), 12), r"routing-layers.*5 layers"),
        (random_trace(flat_map([0, 1, 2, 4]), 12), r"routing-layers.*\(0, 1, 2, 4\).*\(0, 1, 2, 3\)"),
        (random_trace(flat_map(range(4), top_k=1), 12), r"routing-top-k.*1 experts per token, expected 2"),
        (random_trace(flat_map(range(4), num_experts=16), 12), r"routing-num-experts.*16 experts.*has 8"),
        (with_ids(5, 2, [3, 8]), r"routing-id-range.*id 8 is not in 0..7; sample p7/2, layer 2, position 5"),
        (with_ids(5, 2, [3, -2], np.int64), r"routing-dtype.*int64, expected uint8 or uint16"),
        (with_ids(5, 2, [3, 1], np.float32), r"routing-dtype.*float32"),
        (with_ids(6, 1, [4, 4]), r"routing-repeated-id.*\[4, 4\].*layer 1, position 6"),
        (replace(good(), experts=good().experts[:, 0]), r"routing-shape.*\(12, 2\)"),
        (
            replace(good(), valid=np.ones(11, dtype=np.bool_)),
            r"routing-valid.*bool \(11,\), expected bool \(12,\)",
        ),
        (replace(good(), valid=np.ones(12, dtype=np.int8)), r"routing-valid.*int8"),
        (random_trace(MODEL, 12, last_valid=True), r"routing-last-row.*position 11"),
    ],
)
def test_each_fault_is_refused_with_its_numbers_and_its_place(trace: RoutingTrace, message: str):
    with pytest.raises(CheckError, match=message) as caught:
        validate(trace)
    assert "sample p7/2" in str(caught.value)


def test_rows_that_do_not_fit_the_tokens_are_refused_with_both_numbers():
    with pytest.raises(CheckError, match="12 route rows for 20 tokens"):
        validate(good(), num_tokens=20)


def test_zeros_from_end_to_end_point_at_the_capture_option():
    model = flat_map(range(40), num_experts=256, top_k=8)
    trace = replace(random_trace(model, 547), experts=np.zeros((547, 40, 8), dtype=np.uint8))
    with pytest.raises(CheckError, match=r"all-zero routes for 40/40 layers.*capture"):
        validate(trace, model)


def test_zeros_in_some_layers_are_counted_and_the_first_is_named():
    trace = good()
    trace.experts[:, 2:] = 0
    with pytest.raises(CheckError, match=r"all-zero routes for 2/4 layers; sample p7/2, first layer 2"):
        validate(trace)


def test_with_one_expert_per_token_zero_is_an_expert():
    model = flat_map([0], top_k=1)
    validate(replace(random_trace(model, 9), experts=np.zeros((9, 1, 1), dtype=np.uint8)), model)


def stale(run: int) -> RoutingTrace:
    """20 natural rows, then `run` copies of one row, then the unfed last token."""
    trace = random_trace(MODEL, 20 + run + 1)
    trace.experts[20:] = trace.experts[20]
    trace.experts[19] = (trace.experts[20] + 1) % 8
    return trace


def test_64_rows_that_are_copies_of_one_are_a_stale_buffer():
    with pytest.raises(CheckError, match=r"constant routes over 64 tokens in all 4 layers.*from position 20"):
        validate(stale(64))
    validate(stale(63))
    trace = stale(64)
    trace.experts[20:84:2, 3] = (trace.experts[20, 3] + 1) % 8  # one layer moves
    validate(trace)


def test_one_token_repeated_64_times_may_well_go_one_way():
    tokens = np.arange(85, dtype=np.int32)
    with pytest.raises(CheckError, match="routing-constant"):
        validate(stale(64), tokens=tokens)
    tokens[20:] = 7
    validate(stale(64), tokens=tokens)


def test_what_the_row_of_the_last_token_holds_does_not_matter():
    trace = good()
    trace.experts[-1] = 255
    validate(trace)


def test_a_token_that_was_an_input_must_have_a_route():
    trace = good()
    trace.valid[3:5] = False
    with pytest.raises(CheckError, match=r"routing-rows-missing.*2 of \d+ tokens.*first at position 3"):
        validate(trace)


def test_a_last_token_that_was_fed_may_have_a_row():
    validate(random_trace(MODEL, 12, last_valid=True), last_is_sampled=False)
