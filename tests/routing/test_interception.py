"""Only the choice is replaced: weights, normalisation and gradients stay the router's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from onroute.core.errors import CheckError, UserError
from onroute.models.tiny import tiny_config, tiny_model
from onroute.routing.discovery import discover
from onroute.routing.interception import RouterHooks
from onroute.routing.sites import RoutingMap, RoutingSite
from tests.routing.builders import flat_map, logits_of, routers_of, token_ids


class Fixed:
    """Answers every router with the same ids [rows, k]."""

    def __init__(self, ids: list[list[int]]) -> None:
        self.ids = torch.tensor(ids)
        self.masked: Tensor | None = None

    def choose(self, column: int, live_ids: Tensor, masked: Tensor | None) -> Tensor:
        self.masked = masked
        return self.ids


class Live:
    """Answers with the router's own choice, and counts."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def choose(self, column: int, live_ids: Tensor, masked: Tensor | None) -> Tensor:
        self.asked.append(column)
        return live_ids.clone()


def hooked(router: nn.Module, ordinal: int = 0) -> RouterHooks:
    site = RoutingSite(layer=0, module_name="router", ordinal=ordinal, num_experts=4, top_k=2)
    return RouterHooks(nn.ModuleDict({"router": router}), RoutingMap(sites=(site,)))


def four_experts(router_class: Any, model_type: str, **changes: Any) -> Any:
    """A router over 4 experts whose logits are its input."""
    config = tiny_config(model_type, hidden_size=4, **changes)
    router = router_class(config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    return router


@pytest.mark.parametrize(
    ("renormalise", "weights"),
    [(True, [0.7311, 0.2689]), (False, [0.0871, 0.0321])],
    ids=["renormalised", "raw"],
)
def test_weights_of_replayed_experts_come_from_the_full_row_of_scores(
    renormalise: bool, weights: list[float]
):
    # softmax of [4, 3, 2, 1] is [.6439, .2369, .0871, .0321]; of the last two alone [.7311, .2689].
    router = four_experts(Qwen3MoeTopKRouter, "qwen3_moe", num_experts=4, norm_topk_prob=renormalise)
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]], requires_grad=True)
    with hooked(router).using(Fixed([[2, 3]])):
        _, used, ids = router(logits)
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(used, torch.tensor([weights]), atol=1e-4, rtol=0)
    (used * torch.tensor([1.0, 2.0])).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 2:].abs().min() > 1e-3


def test_weights_of_a_sigmoid_router_leave_the_correction_bias_out():
    router = four_experts(
        DeepseekV3TopkRouter,
        "deepseek_v3",
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.0,
    )
    router.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    # sigmoid(ln 3) = 3/4 and sigmoid(0) = 1/2: normalised .6 and .4. Live, the bias picks experts 0 and 1.
    logits = torch.tensor([[0.0, 0.0, 1.0986123, 0.0]], requires_grad=True)
    assert sorted(router(logits)[2][0].tolist()) == [0, 1]
    with hooked(router, ordinal=2).using(Fixed([[2, 3]])):
        _, used, ids = router(logits)
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(used, torch.tensor([[0.6, 0.4]]))
    used[0, 0].backward()
    assert logits.grad is not None
    assert logits.grad[0, 2] > 0 > logits.grad[0, 3]


def test_an_expert_outside_the_live_groups_keeps_its_true_weight():
    router = four_experts(
        DeepseekV2TopkRouter,
        "deepseek_v2",
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.0,
    )
    router.num_experts = 4
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    stock = router(logits)[1]
    hooks, handler = hooked(router, ordinal=1), Fixed([[0, 2], [3, 2]])
    with hooks.using(handler):
        _, used, _ = router(logits)
    # Row 0: experts 0 and 1 are the live group, 2 was masked to zero; 2 * softmax = 1.2878 and .1743.
    assert handler.masked is not None
    assert handler.masked.tolist() == [[False, False, True, True], [True, True, False, False]]
    torch.testing.assert_close(used[0], torch.tensor([1.2878, 0.1743]), atol=1e-4, rtol=0)
    # Row 1 replays what the router chose, and is the stock result to the last bit.
    assert torch.equal(used[1], stock[1])
    used[0, 1].backward()
    assert logits.grad is not None
    assert logits.grad[0, 2] > 0


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "function": lambda s: torch.topk(s, 2),
    "keywords": lambda s: torch.topk(input=s, k=2, dim=1, largest=True, sorted=False),
    "method": lambda s: s.topk(2, dim=-1),
    "masked by where": lambda s: torch.where(s > 2.5, s, 0.0).topk(2),
    "masked by a method": lambda s: s.where(s > 2.5, torch.zeros(())).topk(2),
    "masked twice": lambda s: s.masked_fill(s < 1.5, 0.0).masked_fill(s < 2.5, -9.0).topk(2),
    "masked by a function": lambda s: torch.masked_fill(s, s < 2.5, float("-inf")).topk(2),
    "batch and sequence": lambda s: s[None].topk(2),
}


class Router(nn.Module):
    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, scores: Tensor) -> Any:
        return self.form(scores)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_call_is_replayed_with_unmasked_values(form: str):
    router = Router(FORMS[form])
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    with hooked(router).using(Fixed([[2, 0], [0, 3]])):
        out = router(scores)
    assert out.indices.reshape(2, 2).tolist() == [[2, 0], [0, 3]]
    assert out.values.reshape(2, 2).tolist() == [[2.0, 4.0], [1.0, 4.0]]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_idle_hooks_and_a_live_answer_give_the_stock_logits_to_the_bit(model_type: str):
    model, tokens, live = tiny_model(model_type), token_ids(2, 9), Live()
    with torch.no_grad():
        stock = logits_of(model, tokens)
        hooks = RouterHooks(model, routers_of(model))
        idle = logits_of(model, tokens)
        with hooks.using(live):
            answered = logits_of(model, tokens)
    assert torch.equal(stock, idle)
    assert torch.equal(stock, answered)
    assert live.asked == list(range(len(hooks.map.sites)))


def test_a_model_with_hub_kernels_is_refused():
    model: Any = tiny_model("qwen3_moe")
    routers = routers_of(model)
    model.use_kernels = True
    with pytest.raises(UserError, match=r"routing-kernels.*Qwen3MoeForCausalLM.*use_kernels=False"):
        RouterHooks(model, routers)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_remove_gives_the_stock_forward_back_and_keeps_an_earlier_patch():
    model: Any = tiny_model("qwen3_moe")
    gates = [layer.mlp.gate for layer in model.model.layers]
    patch = gates[1].forward
    gates[1].forward = patch
    hooks = RouterHooks(model, routers_of(model))
    assert all("forward" in gate.__dict__ for gate in gates)
    hooks.remove()
    hooks.remove()
    assert [gate.__dict__.get("forward") for gate in gates] == [None, patch, None]


def test_the_handler_is_put_back_when_nested_and_when_the_body_raises():
    router, outer, inner = Router(FORMS["method"]), Live(), Live()
    hooks, scores = hooked(router), torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    with hooks.using(outer):
        with pytest.raises(RuntimeError, match="stop"), hooks.using(inner):
            router(scores)
            raise RuntimeError("stop")
        router(scores)
        with hooks.using(None):
            router(scores)
    router(scores)
    assert (outer.asked, inner.asked) == ([0], [0])


def test_a_failing_router_leaves_no_mode_behind():
    def fail(scores: Tensor) -> Any:
        raise RuntimeError("no experts today")

    router = Router(fail)
    with hooked(router).using(Live()), pytest.raises(RuntimeError, match="no experts today"):
        router(torch.zeros(1, 4))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_copied_model_routes_with_its_own_weights():
    model: Any = tiny_model("qwen3_moe")
    hooks = RouterHooks(model, routers_of(model))
    twin: Any = copy.deepcopy(model)
    gate = twin.model.layers[0].mlp.gate
    with torch.no_grad():
        gate.weight.neg_()
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = -model.model.layers[0].mlp.gate(hidden)[0]
        assert torch.equal(gate(hidden)[0], expected)
    hooks.remove()


def test_a_second_set_of_hooks_is_refused_and_a_missing_module_named():
    model = tiny_model("qwen3_moe")
    found = routers_of(model)
    first = RouterHooks(model, found)
    with pytest.raises(CheckError, match=r"routing-hooked-twice.*layers\.0\.mlp\.gate"):
        RouterHooks(model, found)
    first.remove()
    RouterHooks(model, found).remove()
    with pytest.raises(UserError, match=r"routing-module-missing.*'layers\.7'; layer 7"):
        RouterHooks(model, flat_map([7]))


def rerouted(model: nn.Module, routing_map: RoutingMap, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change what lies between the hook's answer and the experts, in one of the ways Python has."""
    site = routing_map.sites[1]
    router, experts = model.get_submodule(site.module_name), model.get_submodule(site.experts_name)
    if kind == "router wrapped":
        router.forward = functools.partial(router.forward)
    elif kind == "router hooked":
        router.register_forward_hook(lambda module, args, output: output)
    elif kind == "class patched":
        monkeypatch.setattr(type(router), "forward", functools.partialmethod(type(router).forward))
    elif kind == "experts wrapped":
        experts.forward = functools.partial(experts.forward)
    else:
        experts.register_forward_pre_hook(lambda module, args: args)


@pytest.mark.parametrize(
    "kind", ["router wrapped", "router hooked", "class patched", "experts wrapped", "experts hooked"]
)
def test_a_model_that_is_patched_after_install_is_refused(kind, monkeypatch):
    model = tiny_model("qwen3_moe")
    routing_map = discover(model, lambda: model(token_ids(2, 6)))
    hooks = RouterHooks(model, routing_map)
    model(token_ids(2, 6))
    hooks.require_untouched()
    rerouted(model, routing_map, kind, monkeypatch)
    with pytest.raises(CheckError, match=r"routing-patched.*layers\.[01]\.mlp"):
        hooks.require_untouched()
