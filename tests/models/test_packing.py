"""A model is believed to keep packed samples apart only once it was seen to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from onroute.core.batches import PackedBatch
from onroute.core.config.sections import ModelConfig
from onroute.core.errors import UserError
from onroute.models.forward import logits_of
from onroute.models.load import best_attention, load_plain
from onroute.models.packing import TOLERANCE, packing_leak, packing_refusal, require_packing
from onroute.models.shard import load_sharded
from onroute.models.world import World
from tests.models.conftest import SavedModel
from tests.ranks import run_world

CPU = torch.device("cpu")
APART = ("qwen3", "qwen3_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v2")
LEAKING = ("qwen3_5_moe_text", "gpt_oss")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", APART)
def test_a_model_that_keeps_samples_apart_passes(saved: SavedModel, model_type: str, dtype: str):
    model = load_plain(saved(model_type), dtype=DTYPES[dtype], attention="sdpa", experts="grouped_mm")
    assert packing_leak(model, CPU) <= 1e-6
    assert packing_refusal(model, CPU, tolerance=TOLERANCE[dtype]) is None
    require_packing(model, CPU, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", LEAKING)
def test_a_model_that_lets_samples_see_each_other_is_refused(saved: SavedModel, model_type: str, dtype: str):
    folder = saved(model_type)
    attention = best_attention(folder)
    model = load_plain(folder, dtype=DTYPES[dtype], attention=attention, experts="grouped_mm")
    assert packing_leak(model, CPU) > 1.0
    with pytest.raises(UserError, match=r'^\[model-packing\] .* move by 1\.\d.*set data.layout = "rows"$'):
        require_packing(model, CPU, tolerance=TOLERANCE[dtype])


def test_the_probe_leaves_no_gradient_and_no_trace_in_the_generator(saved: SavedModel):
    model = load_plain(saved("qwen3_moe"), dtype=torch.float32, attention="sdpa", experts="eager")
    state = torch.get_rng_state()
    packing_leak(model, CPU)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def sharded_leak(world: World, folder: Path) -> float:
    config = ModelConfig(path=str(folder), attention=best_attention(folder))
    return packing_leak(load_sharded(folder, config, world, reshard=True), world.device)


def test_every_rank_of_a_sharded_model_measures_the_same(saved: SavedModel):
    one, other = run_world(2, sharded_leak, saved("gpt_oss"))
    assert one == other > 1.0
    assert run_world(2, sharded_leak, saved("qwen3_moe")) == [0.0, 0.0]


def batch(layout: str, ids: Tensor, positions: Tensor, mask: Tensor | None) -> PackedBatch:
    return PackedBatch(layout=layout, input_ids=ids, position_ids=positions, attention_mask=mask, spans=())


def test_packed_samples_get_the_logits_they_get_in_rows_of_their_own(saved: SavedModel):
    """Lengths 5 and 3: [a a a a a b b b] against rows a and b + 2 of padding."""
    model = load_plain(saved("qwen3_moe"), dtype=torch.float32, attention="sdpa", experts="eager")
    one, other = torch.arange(3, 8), torch.arange(50, 53)
    positions = torch.cat([torch.arange(5), torch.arange(3)])[None]
    rows = torch.stack([one, torch.cat([other, torch.zeros(2, dtype=torch.long)])])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with torch.no_grad():
        packed = logits_of(model, batch("packed", torch.cat([one, other])[None], positions, None))
        padded = logits_of(model, batch("rows", rows, torch.arange(5).repeat(2, 1), mask))
    assert packed.shape == (1, 8, 128)
    torch.testing.assert_close(packed[0, :5], padded[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(packed[0, 5:], padded[1, :3], rtol=0, atol=1e-5)
