"""Recomputing the decoder layers changes memory and time, never a gradient."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onroute.core.config.sections import ModelConfig
from onroute.core.errors import UserError
from onroute.models.load import best_attention
from onroute.models.shard import load_sharded
from onroute.models.tiny import TINY, tiny_model
from onroute.models.world import World
from onroute.routing.activation import checkpointing, disable_checkpointing, enable_checkpointing
from tests.ranks import run_world

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 128


class Contexts:
    """Counts the layers that were computed under checkpointing, and those computed again."""

    def __init__(self) -> None:
        self.forwards = self.recomputes = 0

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        self.forwards += 1
        return nullcontext(), self

    def __enter__(self) -> None:
        self.recomputes += 1

    def __exit__(self, *error: object) -> None:
        pass


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(TOKENS, use_cache=False).logits[:, :-1].float()
    nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    # An expert that no token chose has no gradient in some implementations, zeros in others.
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("model_type", TINY)
def test_gradients_are_the_same_when_every_layer_is_computed_again(model_type: str):
    model = tiny_model(model_type).train()
    kept = gradients_of(model)
    contexts = Contexts()
    enable_checkpointing(model, contexts)
    assert different(kept, gradients_of(model)) == []
    assert (contexts.forwards, contexts.recomputes) == (3, 3)
    disable_checkpointing(model)
    assert different(kept, gradients_of(model)) == []
    assert (contexts.forwards, contexts.recomputes) == (3, 3)


def test_a_model_in_eval_mode_keeps_its_activations():
    model = tiny_model("qwen3_moe")
    contexts = Contexts()
    enable_checkpointing(model, contexts)
    gradients_of(model)
    assert contexts.forwards == 0


def sharded_differences(world: World, folder: Path) -> tuple[list[str], int]:
    config = ModelConfig(path=str(folder), attention=best_attention(folder))
    model = load_sharded(folder, config, world, reshard=True).train()
    kept = gradients_of(model)
    contexts = Contexts()
    enable_checkpointing(model, contexts)
    again = gradients_of(model)
    kept, again = ({n: g.to_local() for n, g in grads.items()} for grads in (kept, again))
    return different(kept, again), contexts.recomputes


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_a_sharded_bfloat16_model_has_the_same_gradients_too(tmp_path: Path, model_type: str):
    tiny_model(model_type).save_pretrained(tmp_path)
    assert run_world(2, sharded_differences, tmp_path) == [([], 3)] * 2


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_a_probe_leaves_the_switch_and_the_contexts_as_they_were(outer: bool, enabled: bool):
    model = tiny_model("qwen3_moe").train()
    of_run, of_probe = Contexts(), Contexts()
    if outer:
        enable_checkpointing(model, of_run)
    with pytest.raises(KeyError), checkpointing(model, of_probe, enabled=enabled):
        gradients_of(model)
        raise KeyError
    assert (of_run.forwards, of_probe.forwards) == (0, 3 if enabled else 0)
    gradients_of(model)
    assert (of_run.forwards, of_probe.forwards) == (3 if outer else 0, 3 if enabled else 0)


class Wrapped(nn.Module):
    """A decoder layer that hides what it wraps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def test_a_layer_that_cannot_be_computed_again_is_refused_by_its_number():
    model = tiny_model("qwen3_moe").train()
    model.model.layers[1] = Wrapped(model.model.layers[1])
    line = r"decoder layer 1 can't be recomputed; Qwen3MoeForCausalLM; .*activation_checkpointing"
    with pytest.raises(UserError, match=line):
        enable_checkpointing(model, Contexts())
    disable_checkpointing(model)
    contexts = Contexts()
    with pytest.raises(UserError, match=line), checkpointing(model, contexts, enabled=True):
        pass
    gradients_of(model)
    assert contexts.forwards == 0
