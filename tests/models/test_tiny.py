"""Tiny models are tiny, reproducible, and route their tokens differently."""

from __future__ import annotations

import pytest
import torch

from onroute.core.errors import UserError
from onroute.models.tiny import TINY, tiny_config, tiny_model


@pytest.mark.parametrize("model_type", TINY)
def test_a_tiny_model_is_the_same_for_a_seed_and_leaves_the_generator_alone(model_type: str):
    torch.manual_seed(3)
    model = tiny_model(model_type, seed=1, dtype=torch.bfloat16)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert sum(p.numel() for p in model.parameters()) < 500_000
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training
    twin = tiny_model(model_type, seed=1, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, twin[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_would_not_be_tiny_is_refused_before_it_is_allocated():
    config = tiny_config("qwen3_moe", hidden_size=4096, vocab_size=150_000)
    with pytest.raises(UserError, match=r"models-tiny-size.*parameters, at most 30,000,000"):
        tiny_model("qwen3_moe", config=config)


def test_an_unknown_family_is_refused_with_those_that_are_known():
    with pytest.raises(UserError, match=r"no tiny model of type 'phimoe'.*qwen3_moe"):
        tiny_config("phimoe")
