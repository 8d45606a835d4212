"""Routers are found by what they do; what cannot be proved is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onroute.core.errors import UserError
from onroute.models.families.build import tiny_family
from onroute.models.tiny import tiny_model
from onroute.routing.discovery import decoder_stack, decoder_stack_name, discover
from tests.routing.builders import build, logits_of, routers_of, token_ids


@pytest.mark.parametrize(
    ("model_type", "layers", "ordinal"),
    [
        ("qwen3_moe", (0, 1, 2), 0),
        ("qwen3_5_moe_text", (0, 1, 2), 0),
        ("gpt_oss", (0, 1, 2), 0),
        # The first layer is dense; two choices of groups come before the choice of experts.
        ("glm4_moe_lite", (1, 2), 2),
        ("deepseek_v3", (1, 2), 2),
        ("deepseek_v2", (1, 2), 1),
    ],
)
def test_every_family_gives_its_moe_layers_under_global_indices(
    model_type: str, layers: tuple[int, ...], ordinal: int
):
    found = routers_of(tiny_model(model_type))
    assert found.signature == (layers, 8, 2)
    assert {site.ordinal for site in found.sites} == {ordinal}
    assert found.outside == ()


def test_twelve_layers_are_sorted_as_numbers_not_as_text():
    found = routers_of(build(num_hidden_layers=12))
    assert found.layers == tuple(range(12))
    assert found.sites[10].module_name == "model.layers.10.mlp.gate"


def test_layers_declared_dense_are_skipped():
    assert routers_of(build(num_hidden_layers=5, mlp_only_layers=[0, 3])).layers == (1, 2, 4)


def test_as_many_experts_as_layers_do_not_hide_the_decoder_stack():
    model = build(num_hidden_layers=8)
    assert decoder_stack_name(model) == "model.layers"
    assert routers_of(model).layers == tuple(range(8))


class Wrapper(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config


def test_a_wrapper_around_the_model_changes_names_and_not_layers():
    wrapper = Wrapper(tiny_model("deepseek_v3"))
    found = discover(wrapper, lambda: logits_of(wrapper.inner, token_ids(1, 5)))
    assert found.layers == (1, 2)
    assert found.sites[0].module_name == "inner.model.layers.1.mlp.gate"
    assert decoder_stack(wrapper) is wrapper.inner.model.layers


def test_a_router_outside_the_stack_is_named_and_left_alone():
    model: Any = build(num_hidden_layers=2)
    model.mtp = build(num_hidden_layers=1).model.layers[0].mlp

    def forward() -> None:
        hidden = model.model(input_ids=token_ids(1, 6), use_cache=False).last_hidden_state
        model.mtp(hidden)

    found = discover(model, forward)
    assert found.layers == (0, 1)
    assert found.outside == ("mtp.gate",)


def test_the_token_choice_of_sparse_attention_is_not_a_router():
    model: Any = tiny_model("qwen3_moe")
    attention = model.model.layers[1].self_attn
    seen = []

    class Indexer(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return (hidden @ hidden.transpose(1, 2)).topk(2, dim=-1).indices

    attention.indexer = Indexer()
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(module.indexer(kwargs["hidden_states"])), with_kwargs=True
    )
    # As in families that share the choice: the next layer's attention is handed it.
    next_layer = model.model.layers[2]
    stock = next_layer.self_attn.forward

    def attend(*args: Any, chosen: torch.Tensor, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    next_layer.self_attn.forward = attend
    next_layer.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "chosen": seen[-1]}), with_kwargs=True
    )
    found = routers_of(model)
    assert seen[0].shape == (2, 7, 2)
    assert [site.module_name for site in found.sites] == [f"model.layers.{i}.mlp.gate" for i in range(3)]
    assert found.live == ("model.layers.1.self_attn.indexer",)


def test_a_layer_that_also_routes_in_its_attention_has_two_routers_in_the_order_of_the_forward():
    found = routers_of(tiny_family("jetmoe"))
    assert found.layers == (0, 0, 1, 1, 2, 2)
    assert [site.module_name for site in found.sites[2:4]] == [
        "model.layers.1.self_attention.experts.router",
        "model.layers.1.mlp.router",
    ]


def test_a_dense_model_is_refused_with_the_key_to_set():
    with pytest.raises(UserError, match=r'routing-dense-model.*set routing.replay = "off"'):
        routers_of(tiny_model("qwen3"))


def test_experts_without_a_visible_choice_are_refused_by_layer():
    model: Any = tiny_model("qwen3_moe")
    gate = model.model.layers[1].mlp.gate

    def by_sorting(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = torch.nn.functional.linear(hidden, gate.weight).softmax(-1)
        values, ids = scores.sort(-1, descending=True)
        return scores, values[:, :2], ids[:, :2]

    gate.forward = by_sorting
    with pytest.raises(UserError, match=r"routing-layers.*1 decoder layer.*layers 1;.*cannot be proved"):
        routers_of(model)
    for layer in model.model.layers:
        layer.mlp.gate.forward = by_sorting
    with pytest.raises(UserError, match=r"routing-layers.*3 decoder layer.*layers 0, 1, 2;"):
        routers_of(model)


def test_routers_of_different_widths_are_refused_by_name():
    model: Any = tiny_model("qwen3_moe")
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(
        UserError, match=r"routing-mixed.*layers\.0\.mlp\.gate.*top 2.*layers\.1\.mlp\.gate.*top 3"
    ):
        routers_of(model)


def test_a_router_that_runs_twice_in_a_forward_is_refused():
    model: Any = tiny_model("qwen3_moe")
    block = model.model.layers[2].mlp
    stock = block.forward
    block.forward = lambda hidden: stock(stock(hidden))
    with pytest.raises(UserError, match=r"routing-repeated.*modules model.layers.2.mlp.gate;"):
        routers_of(model)


def test_no_hook_is_left_behind_also_when_the_forward_fails():
    model = tiny_model("qwen3_moe")

    def failing() -> None:
        logits_of(model, token_ids(1, 4))
        raise RuntimeError("out of tokens")

    with pytest.raises(RuntimeError, match="out of tokens"):
        discover(model, failing)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert torch.overrides._get_current_function_mode_stack() == []
