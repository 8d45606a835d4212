"""Replay in a plain PyTorch loop: a few lines around stock code, without engine, driver or run file."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from onroute.core.errors import CheckError
from onroute.models.tiny import tiny_model
from onroute.models.world import World
from onroute.routing.activation import enable_checkpointing
from onroute.routing.replay import RoutingReplay
from tests.ranks import run_world
from tests.routing.builders import random_trace, token_ids

TOKENS = token_ids(2, 9)


def loss_of(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def recorded(replay: RoutingReplay, model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with replay.recording() as record, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    return record.ids


def shifted_ids(replay: RoutingReplay, rows: int = TOKENS.numel()) -> Tensor:
    """Experts that no router would choose."""
    trace = random_trace(replay.map, rows, seed=3, last_valid=True)
    return torch.from_numpy(trace.experts).long().transpose(0, 1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_a_training_loop_goes_on_the_route_that_the_first_pass_took():
    model = tiny_model("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replay = RoutingReplay(model)
    replay.prove().require()
    with replay.recording() as record, torch.no_grad():
        model(input_ids=TOKENS)
    losses = []
    for _ in range(6):
        with replay.replaying(record.ids):
            loss = loss_of(model)
        loss.backward()
        metrics = replay.settle()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert metrics.replayed_share == 1.0
    assert losses[-1] < losses[0] - 1
    assert metrics.agreement is not None
    assert metrics.agreement < 1  # six such steps move the routers, and the route stays


def test_replay_of_the_models_own_route_changes_no_bit_and_other_routes_change_the_loss():
    model = tiny_model("qwen3_moe")
    loss_of(model).backward()
    stock = gradients(model)
    replay = RoutingReplay(model)
    with replay.replaying(recorded(replay, model)):
        loss_of(model).backward()
    assert replay.settle().agreement == 1.0
    assert_same(gradients(model), stock)
    with replay.replaying(shifted_ids(replay)), torch.no_grad():
        other = loss_of(model)
    replay.settle()
    assert abs(other - loss_of(model)) > 1e-4


def test_checkpointed_layers_recompute_on_the_same_route_though_the_live_router_moved_meanwhile():
    model = tiny_model("qwen3_moe").train()
    replay = RoutingReplay(model)
    ids = shifted_ids(replay)
    with replay.replaying(ids):
        loss_of(model).backward()
    replay.settle()
    plain = gradients(model)
    replay.enable_checkpointing()
    with replay.replaying(ids):
        first = loss_of(model)
    with replay.replaying(ids.roll(1, dims=1)):  # another microbatch before the first one's backward pass
        loss_of(model)
    first.backward()
    with pytest.raises(CheckError, match=r"routing-ledger.*microbatch 1, recompute pass: replayed 0 time"):
        replay.settle()
    assert_same(gradients(model), plain)


def test_a_recompute_without_the_contexts_is_refused_where_it_happens():
    model = tiny_model("qwen3_moe").train()
    replay = RoutingReplay(model)
    enable_checkpointing(model, lambda: (nullcontext(), nullcontext()))
    with replay.replaying(shifted_ids(replay)):
        loss = loss_of(model)
    with pytest.raises(CheckError, match=r"routing-foreign-recompute.*context_fn"):
        loss.backward()


def test_rows_that_are_not_valid_stay_live():
    model = tiny_model("qwen3_moe")
    replay = RoutingReplay(model)
    live, other = recorded(replay, model), shifted_ids(replay)
    valid = torch.zeros(TOKENS.numel(), dtype=torch.bool)
    valid[:9] = True
    with torch.no_grad(), replay.replaying(other, valid):
        model(input_ids=TOKENS, use_cache=False)
    metrics = replay.settle()
    assert metrics.live_rows == 0.5
    with torch.no_grad(), replay.replaying(torch.where(valid[:, None], live, -1), valid):
        model(input_ids=TOKENS, use_cache=False)
    assert replay.settle().agreement == 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda ids: ids.index_fill(2, torch.tensor(0), 8),
            r"routing-ids.*\[8, \d\].*layer 0, row 0",
        ),
        (lambda ids: ids.index_fill(2, torch.tensor(1), -1), r"routing-ids.*-1\] are not 2 different"),
        (lambda ids: ids * 0 + 3, r"routing-ids.*\[3, 3\]"),
        (lambda ids: ids[:2], r"routing-record-shape.*expected \[3, rows, 2\]"),
        (lambda ids: ids[..., :1], r"routing-record-shape"),
        (lambda ids: ids[0], r"routing-record-shape"),
        (lambda ids: ids[:, :-1], r"routing-rows.*\[18, 2\].*\[17, 2\]"),
    ],
)
def test_routes_that_cannot_be_those_of_the_rows_are_refused(change: Any, said: str):
    model = tiny_model("qwen3_moe")
    replay = RoutingReplay(model)
    with pytest.raises(CheckError, match=said), replay.replaying(change(shifted_ids(replay))):
        loss_of(model)
    replay.clear()
    with replay.replaying(shifted_ids(replay)):
        loss_of(model).backward()
    assert replay.settle().replayed_share == 1.0


def test_a_patched_router_is_refused_and_removal_gives_the_stock_model_back():
    model: Any = tiny_model("qwen3_moe")
    stock = loss_of(model)
    replay = RoutingReplay(model)
    gate = model.model.layers[1].mlp.gate
    hooked = gate.forward
    gate.forward = partial(hooked)
    said = r"routing-patched.*layers\.1\.mlp\.gate"
    with pytest.raises(CheckError, match=said), replay.replaying(shifted_ids(replay)):
        pass
    gate.forward = hooked
    replay.remove()
    assert torch.equal(loss_of(model), stock)
    assert not any("forward" in module.__dict__ for module in model.modules())


def sharded_gradients(world: World, checkpointed: bool) -> dict[str, Tensor]:
    """Each rank has one row of the tokens; gradients are those of the mean over ranks."""
    model = tiny_model("qwen3_moe").train()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    replay = RoutingReplay(model)
    replay.prove().require()
    if checkpointed:
        replay.enable_checkpointing()
    rows = slice(9 * world.rank, 9 * (world.rank + 1))
    with replay.replaying(shifted_ids(replay)[:, rows]):
        loss_of(model, TOKENS[world.rank][None]).backward()
    metrics = replay.settle(reduce=world.sum)
    assert metrics.replayed_share == 1.0
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_ranks_of_fsdp_give_the_gradients_of_one_process(checkpointed: bool):
    model = tiny_model("qwen3_moe")
    replay = RoutingReplay(model)
    with replay.replaying(shifted_ids(replay)):
        loss_of(model).backward()
    replay.settle()
    alone = gradients(model)
    for rank in run_world(2, sharded_gradients, checkpointed):
        assert rank.keys() == alone.keys()
        whole, expected = (torch.cat([grads[name].flatten() for name in alone]) for grads in (rank, alone))
        assert float((whole - expected).norm() / expected.norm()) < 1e-6
