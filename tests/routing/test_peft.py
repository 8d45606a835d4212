"""Replay goes with adapters on the experts: LoRA by PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onroute.models.tiny import tiny_model
from onroute.routing.replay import RoutingReplay
from tests.routing.test_replay import loss_of, recorded, shifted_ids

peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install onroute[peers]")


def adapted(model_type: str) -> Any:
    """Adapters with weights of their own on attention and on the experts' two stacked matrices."""
    model = tiny_model(model_type)
    config = peft.LoraConfig(
        r=4,
        target_modules=["o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return wrapped.train()


def passed(model: Any, replay: RoutingReplay, ids: torch.Tensor) -> tuple[float, dict[str, Any]]:
    with replay.replaying(ids):
        loss = loss_of(model)
    loss.backward()
    replay.settle()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss.detach()), grads


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_adapters_on_the_experts_train_on_the_replayed_route(model_type: str):
    model = adapted(model_type)
    live = float(loss_of(model).detach())
    replay = RoutingReplay(model)
    report = replay.prove()
    report.require()
    assert report.rows[3].detail.endswith(f"{len(replay.map.sites)} frozen")
    own, _ = passed(model, replay, recorded(replay, model))
    assert own == live
    other, plain = passed(model, replay, shifted_ids(replay))
    assert abs(other - live) > 1e-4
    assert any(".experts." in name and "lora_A" in name and grad.any() for name, grad in plain.items())
    replay.enable_checkpointing()
    again, recomputed = passed(model, replay, shifted_ids(replay))
    assert again == other
    assert [name for name in plain if not torch.equal(plain[name], recomputed[name])] == []
