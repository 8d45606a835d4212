"""Discovery, replay and its proofs work on a model sharded by FSDP2 as on a plain one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from onroute.models.tiny import tiny_model
from onroute.routing.discovery import decoder_stack
from onroute.routing.selfcheck import self_check
from tests.routing.builders import logits_of, rigged, routers_of, token_ids


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_a_sharded_model_passes_the_whole_self_check(one_rank: None, model_type: str):
    model, tokens = tiny_model(model_type), token_ids(2, 8)
    plain = routers_of(model)
    with torch.no_grad():
        stock = logits_of(model, tokens)
    for layer in decoder_stack(model):
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    with rigged(model) as rig:
        assert rig.map == plain
        assert any(isinstance(p, DTensor) for p in model.parameters())
        report = self_check(
            model,
            rig.hooks,
            rig.session,
            forward=lambda: logits_of(model, tokens),
            checkpointing=rig.checkpointing,
        )
        report.require()
    assert len(report.rows) == 5
    with torch.no_grad():
        assert torch.equal(stock, logits_of(model, tokens))
