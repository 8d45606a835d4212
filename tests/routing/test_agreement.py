"""Agreement counts common experts, whatever their order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.routing.agreement import agreement
from tests.routing.builders import flat_map, random_trace


def trace(experts: list[list[list[int]]], valid: list[bool]) -> RoutingTrace:
    return RoutingTrace(
        experts=np.array(experts, dtype=np.uint8), layers=(1, 4), num_experts=8, valid=np.array(valid)
    )


def test_agreement_is_the_share_of_common_experts_over_rows_valid_in_both():
    a = trace([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [0, 1]]], [True, True, False])
    b = trace([[[1, 2], [3, 2]], [[4, 5], [0, 1]], [[0, 1], [0, 1]]], [True, True, True])
    found = agreement(a, b)
    # Layer 1: 1/2 and 2/2. Layer 4: 2/2 and 0/2. The third row is valid in one trace only.
    assert found.per_layer.tolist() == [0.75, 0.5]
    assert (found.mean, found.num_rows) == (0.625, 2)


def test_a_trace_agrees_wholly_with_itself():
    own = random_trace(flat_map(range(3)), 40)
    assert agreement(own, own).mean == 1.0


def test_traces_that_cannot_be_compared_are_refused():
    own = random_trace(flat_map(range(3)), 40)
    with pytest.raises(CheckError, match="routing-agreement-shape"):
        agreement(own, random_trace(flat_map(range(3)), 41))
    with pytest.raises(CheckError, match="routing-agreement-empty"):
        agreement(own, replace(own, valid=~own.valid))
