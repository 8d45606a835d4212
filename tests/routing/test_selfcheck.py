"""The self-check passes on the families that are supported, and each of its proofs can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onroute.core.errors import CheckError
from onroute.models.tiny import tiny_model
from onroute.routing.selfcheck import SelfCheckReport, self_check
from tests.routing.builders import checkpointed, logits_of, rigged, token_ids

FAMILIES = ["qwen3_moe", "qwen3_5_moe_text", "glm4_moe_lite", "deepseek_v3", "gpt_oss", "deepseek_v2"]


def check(model: Any, forward: Callable[[], Tensor] | None = None, **changes: Any) -> SelfCheckReport:
    tokens = token_ids(2, 8)
    with rigged(model) as rig:
        given: dict[str, Any] = {
            "forward": forward or (lambda: logits_of(model, tokens)),
            "checkpointing": rig.checkpointing,
        }
        return self_check(model, rig.hooks, rig.session, **{**given, **changes})


def failed(report: SelfCheckReport) -> list[str]:
    return [row.name for row in report.rows if not row.passed]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_proof_holds_for_the_family(model_type: str):
    report = check(tiny_model(model_type))
    assert [row.name for row in report.rows] == [
        "layers_found",
        "self_replay_bitwise",
        "permutation_changes_logits",
        "router_gradient",
        "recompute",
    ]
    assert failed(report) == []
    report.require()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_every_proof_holds_in_bfloat16(model_type: str):
    check(tiny_model(model_type, dtype=torch.bfloat16)).require()


def test_the_model_is_left_as_it_was():
    model: Any = tiny_model("qwen3_moe").train()
    model.model.layers[1].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    check(model).require()
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    assert (model.training, model.model.layers[0].training, model.model.layers[1].training) == (
        True,
        True,
        False,
    )
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_layers_that_the_engine_does_not_report_fail_the_first_proof():
    report = check(tiny_model("deepseek_v3"), engine_layers=(0, 1, 2))
    assert failed(report) == ["layers_found"]
    with pytest.raises(
        CheckError, match=r"1 of 5 checks.*engine reports layers \(0, 1, 2\), the model has \(1, 2\)"
    ):
        report.require()


def test_a_model_that_is_not_deterministic_cannot_be_proved():
    model, tokens, calls = tiny_model("qwen3_moe"), token_ids(2, 8), []

    def noisy() -> Tensor:
        calls.append(1)
        return logits_of(model, tokens) + len(calls) * 1e-3

    report = check(model, noisy)
    assert "self_replay_bitwise" in failed(report)
    assert "two stock passes differ by" in report.rows[1].detail


def test_a_model_that_ignores_its_experts_fails_the_permutation_and_the_gradient():
    model: Any = tiny_model("qwen3_moe")
    for layer in model.model.layers:
        stock = layer.mlp.forward
        layer.mlp.forward = lambda hidden, stock=stock: stock(hidden).detach() * 0 + hidden
    assert failed(check(model)) == ["permutation_changes_logits", "router_gradient"]


def test_a_detached_router_is_named_and_a_frozen_one_counted():
    model: Any = tiny_model("qwen3_moe")
    gates = [layer.mlp.gate for layer in model.model.layers]
    gates[0].weight.requires_grad_(False)
    stock = gates[1].forward
    gates[1].forward = lambda hidden: [out.detach() for out in stock(hidden)]
    report = check(model)
    assert failed(report) == ["router_gradient"]
    assert report.rows[3].detail == (
        "1 of 2 routers get a finite, non-zero gradient; 1 frozen; not model.layers.1.mlp.gate"
    )
    gates[1].forward = stock
    assert check(model).passed


def test_a_checkpoint_without_the_sessions_context_fails_the_last_proof():
    model = tiny_model("qwen3_moe")
    report = check(
        model,
        checkpointing=lambda on: checkpointed(
            model, lambda f, *a: checkpoint(f, *a, use_reentrant=False), on
        ),
    )
    assert failed(report) == ["recompute"]
    assert "routing-foreign-recompute" in report.rows[4].detail


def test_dropout_in_training_mode_does_not_disturb_the_proofs():
    model: Any = tiny_model("qwen3_moe")
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.5))
    check(model).require()


def test_without_checkpointing_there_is_no_row_about_it():
    assert len(check(tiny_model("qwen3_moe"), checkpointing=None).rows) == 4
