"""Routes become traces of the smallest type, and a hook that is gone is no silent zero."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onroute.core.errors import CheckError, UserError
from onroute.core.samples import SampleRequest
from onroute.engines.capture import RouteCapture
from onroute.engines.decode import decode
from onroute.models.tiny import tiny_config, tiny_model
from onroute.routing.validation import validate_trace


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (256, np.uint8), (300, np.uint16)])
def test_a_trace_holds_every_expert_id_in_the_smallest_type(
    num_experts: int, dtype: type, make_request: Callable[..., SampleRequest]
) -> None:
    config = tiny_config("qwen3_moe", num_experts=num_experts, moe_intermediate_size=4, hidden_size=32)
    model = tiny_model("qwen3_moe", config=config)
    capture = RouteCapture(model)
    (got,) = decode(model, [make_request(200, max_new_tokens=40)], capture=capture)
    trace = capture.trace(got.routes, 240)  # type: ignore[arg-type]
    assert trace.experts.dtype == dtype
    assert trace.experts.shape == (240, 3, 2)
    # 239 rows x 3 layers x 2 choices reach into the last quarter of the ids.
    assert num_experts * 3 // 4 < trace.experts.max() < num_experts
    assert trace.valid.tolist() == [True] * 239 + [False]
    validate_trace(
        trace, num_tokens=240, layers=capture.map.layers, num_experts=num_experts, top_k=2, sample_id="a"
    )


def test_dense_layers_have_no_column() -> None:
    assert RouteCapture(tiny_model("deepseek_v3")).map.layers == (1, 2)


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(UserError, match="dense model"):
        RouteCapture(tiny_model("qwen3"))


def test_a_router_that_lost_its_hook_is_an_error_that_names_its_layer(
    make_request: Callable[..., SampleRequest],
) -> None:
    model = tiny_model("qwen3_moe")
    capture = RouteCapture(model)
    router = model.get_submodule(capture.map.sites[1].module_name)
    del router.__dict__["forward"]
    with pytest.raises(CheckError, match="layer 1: 0"):
        decode(model, [make_request(4)], capture=capture)


def test_removing_gives_the_stock_model_back() -> None:
    model = tiny_model("qwen3_moe")
    RouteCapture(model).remove()
    assert all("forward" not in module.__dict__ for module in model.modules())
    RouteCapture(model).remove()
