"""Replay goes with compiled decoder layers: the router runs as it is, the rest is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onroute.models.tiny import tiny_model
from onroute.routing.replay import RoutingReplay
from tests.routing.test_replay import gradients, loss_of, recorded, shifted_ids


@pytest.fixture(autouse=True)
def no_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_model(backend: str) -> Any:
    model: Any = tiny_model("qwen3_moe").train()
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("backend", "tolerance"), [("aot_eager", 0.0), ("inductor", 1e-5)])
def test_compiled_layers_take_the_replayed_route_and_the_live_one_again(
    backend: str, tolerance: float, checkpointed: bool
):
    plain = tiny_model("qwen3_moe").train()
    live_loss = float(loss_of(plain).detach())
    replay = RoutingReplay(plain)
    ids = shifted_ids(replay)
    with replay.replaying(ids):
        loss = loss_of(plain)
    loss.backward()
    replay.settle()
    expected = gradients(plain)

    model = compiled_model(backend)
    replay = RoutingReplay(model)
    replay.prove().require()
    if checkpointed:
        replay.enable_checkpointing()
    for _ in range(2):
        assert float(loss_of(model).detach()) == pytest.approx(live_loss, abs=tolerance)
        assert recorded(replay, model).shape == ids.shape
        with replay.replaying(ids):
            again = loss_of(model)
        again.backward()
        assert replay.settle().replayed_share == 1.0
        assert float(again.detach()) == pytest.approx(float(loss.detach()), abs=tolerance)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=tolerance, msg=name)
