"""AdamW on float32 masters, the learning rate by closed form, the norm over all ranks."""

from __future__ import annotations

import math
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from onroute.core.config.sections import OptimizerConfig
from onroute.models.tiny import tiny_model
from onroute.models.world import World
from onroute.training.optimizer import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from tests.ranks import run_world


def test_matrices_decay_and_vectors_do_not():
    model = tiny_model("gpt_oss")
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1), lr=1e-2)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {decays[id(p)] for p in model.parameters() if p.dim() < 2} == {0.0}
    assert {decays[id(p)] for p in model.parameters() if p.dim() >= 2} == {0.1}
    assert len(decays) == len(list(model.parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 1.0 if parameter.dim() < 2 else 1.0 - 1e-2 * 0.1
        torch.testing.assert_close(parameter.detach(), before[name] * kept)


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(), lr=1.0)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_the_rate_climbs_evenly_and_then_stays():
    config = OptimizerConfig(lr=4.0, warmup_steps=4)
    rates = [learning_rate(step, config, total_steps=6) for step in range(6)]
    assert rates == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_the_cosine_falls_from_the_peak_and_would_reach_zero_after_the_last_step():
    config = OptimizerConfig(lr=2.0, warmup_steps=2, schedule="cosine")
    rates = [learning_rate(step, config, total_steps=6) for step in range(7)]
    # After the climb 1, 2: lr * (1 + cos(pi * k / 4)) / 2 for k = 0..4.
    half = math.sqrt(0.5)
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1 + half, 1.0, 1 - half, 0.0])


@pytest.mark.parametrize("schedule", get_args(get_type_hints(OptimizerConfig)["schedule"]))
@pytest.mark.parametrize("warmup_steps", [0, 1, 3, 10, 50])
@pytest.mark.parametrize("total_steps", [1, 3, 10])
def test_every_schedule_is_finite_and_above_zero_at_every_step(
    schedule: str, warmup_steps: int, total_steps: int
):
    config = OptimizerConfig(lr=1e-3, warmup_steps=warmup_steps, schedule=schedule)
    rates = [learning_rate(step, config, total_steps=total_steps) for step in range(total_steps)]
    assert all(0.0 < rate <= 1e-3 for rate in rates)
    assert learning_rate(10 * total_steps + 60, config, total_steps=total_steps) >= 0.0


def test_every_group_gets_the_rate():
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerConfig(), lr=1.0)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_updates_below_the_spacing_of_bfloat16_are_kept(world: World):
    # The weight 1.0 gets gradient 1 in 100 steps at 1e-6: AdamW moves it by lr each step, to 0.9999.
    # In bfloat16 the next number below 1 is 0.996, and nothing would ever change.
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=world.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = build_optimizer(model, OptimizerConfig(), lr=1e-6)
    for _ in range(100):
        optimizer.zero_grad()
        seen = model(torch.ones(1, 1))
        assert seen.dtype == torch.bfloat16
        seen.sum().backward()
        optimizer.step()
    weight = model.weight
    assert isinstance(weight, DTensor)
    assert weight.dtype == torch.float32
    assert float(weight.detach().full_tensor()) == pytest.approx(0.9999, abs=5e-6)
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[weight]["exp_avg_sq"].dtype == torch.float32


def clip_three_and_four(world: World, max_norm: float) -> tuple[float, list[float]]:
    model = nn.Linear(1, 2, bias=False)
    fully_shard(model, mesh=world.mesh)
    # The gradient of w is [3, 4], one entry on each rank.
    (model(torch.ones(1, 1)) * torch.tensor([3.0, 4.0])).sum().backward()
    norm = clip_gradients(model.parameters(), max_norm)
    return norm, model.weight.grad.full_tensor().flatten().tolist()


def test_the_norm_runs_over_all_ranks():
    for norm, gradient in run_world(2, clip_three_and_four, 1.0):
        assert norm == pytest.approx(5.0)
        assert gradient == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.parametrize("limit", [5.5, math.inf])
def test_a_norm_within_its_limit_leaves_the_gradient_alone(world: World, limit: float):
    assert clip_three_and_four(world, limit) == (5.0, [3.0, 4.0])
