"""The ledger stops a step in which any router was not replayed once per pass with the ids of the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onroute.core.errors import CheckError
from onroute.models.tiny import tiny_model
from onroute.routing.ledger import Ledger
from onroute.routing.microbatch import MicrobatchRoutes, lay_out
from tests.routing.builders import CPU, Rig, flat_map, logits_of, one_span, random_trace, rigged, token_ids

TOKENS = 9


def forward(rig: Rig, key: str) -> Tensor:
    with rig.session.microbatch(key):
        return logits_of(rig.model, token_ids(1, TOKENS)).sum()


def nothing(rig: Rig) -> None:
    pass


def unreached(rig: Rig) -> None:
    """As when a kernel replaces the router's forward after the hooks are on."""
    gate = rig.model.get_submodule("model.layers.1.mlp.gate")
    gate.__dict__["forward"] = type(gate).forward.__get__(gate)


def reached_twice(rig: Rig) -> None:
    block: Any = rig.model.get_submodule("model.layers.1.mlp")
    stock = block.forward
    block.forward = lambda hidden: stock(hidden) + block.gate(hidden.flatten(0, 1))[1].sum() * 0


def wrong_ids(rig: Rig) -> None:
    routes = rig.session._microbatches["a"]
    routes.ids_LRK[1, 3, 0] = (routes.ids_LRK[1, 3, 0] + 1) % 8


def another_microbatch(rig: Rig) -> None:
    """Recomputes run as "b" whoever's forward pass it was."""
    session, stock = rig.session, rig.session.context_fn

    def always_b() -> Any:
        before = session._bound
        assert before is not None
        session._bound = replace(before, routes=session._microbatches["b"])
        try:
            return stock()
        finally:
            session._bound = before

    layer: Any = rig.model.get_submodule("model.layers.1")
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=always_b)


@pytest.mark.parametrize(
    ("sabotage", "where"),
    [
        (unreached, r"layer 1, microbatch a, forward pass: replayed 0 time\(s\), expected 1"),
        (reached_twice, r"layer 1, microbatch a, forward pass: replayed 2 time\(s\), expected 1"),
        (wrong_ids, r"layer 1, microbatch a, forward pass: the ids in use were not those of the trace"),
        (another_microbatch, r"layer 1, microbatch a, recompute pass: replayed 0 time\(s\), expected 1"),
    ],
)
def test_every_way_to_miss_the_route_stops_the_step(sabotage: Callable[[Rig], None], where: str):
    model: Any = tiny_model("qwen3_moe").train()
    with rigged(model) as rig, rig.checkpointing(True):
        for act in (nothing, sabotage):
            with rig.session.holding({0: rig.trace(TOKENS, 1), 1: rig.trace(TOKENS, 2)}):
                rig.session.bind("a", one_span(TOKENS, sample=0), TOKENS)
                rig.session.bind("b", one_span(TOKENS, sample=1), TOKENS)
                act(rig)
                losses = [forward(rig, key) for key in "ab"]
                for loss in losses:
                    loss.backward()
                if act is nothing:
                    rig.session.settle(recompute=True)
                else:
                    with pytest.raises(CheckError, match=rf"routing-ledger.*nothing was stepped; .*{where}"):
                        rig.session.settle(recompute=True)


@pytest.mark.parametrize("declared", [True, False])
def test_a_recompute_is_due_if_and_only_if_layers_are_checkpointed(declared: bool):
    with rigged(tiny_model("qwen3_moe").train()) as rig, rig.session.holding({0: rig.trace(TOKENS)}):
        rig.session.bind("a", one_span(TOKENS), TOKENS)
        with rig.checkpointing(not declared):
            forward(rig, "a").backward()
        with pytest.raises(
            CheckError, match=rf"recompute pass: replayed {1 - declared} .*expected {int(declared)}"
        ):
            rig.session.settle(recompute=declared)


def test_a_pass_without_gradients_is_due_no_recompute_and_one_without_backward_is():
    with (
        rigged(tiny_model("qwen3_moe").train()) as rig,
        rig.checkpointing(True),
        rig.session.holding({0: rig.trace(TOKENS)}),
    ):
        rig.session.bind("a", one_span(TOKENS), TOKENS)
        with torch.no_grad():
            forward(rig, "a")
        rig.session.settle(recompute=True)
        rig.session.bind("a", one_span(TOKENS), TOKENS)
        forward(rig, "a")
        with pytest.raises(CheckError, match="recompute pass: replayed 0"):
            rig.session.settle(recompute=True)


def test_a_backward_pass_after_the_books_are_closed_is_refused():
    with (
        rigged(tiny_model("qwen3_moe").train()) as rig,
        rig.checkpointing(True),
        rig.session.holding({0: rig.trace(TOKENS)}),
    ):
        rig.session.bind("a", one_span(TOKENS), TOKENS)
        loss = forward(rig, "a")
        with pytest.raises(CheckError, match="recompute pass: replayed 0"):
            rig.session.settle(recompute=True)
        with pytest.raises(CheckError, match="routing-ledger-closed"):
            loss.backward()


def test_a_filler_microbatch_is_counted():
    model: Any = tiny_model("qwen3_moe").train()
    with rigged(model) as rig, rig.session.holding({}):
        rig.session.bind("filler", [], 1)
        with rig.session.microbatch("filler"):
            logits_of(model, token_ids(1, 1))
        metrics = rig.session.settle(recompute=False)
        assert metrics.published() == {}
        unreached(rig)
        rig.session.bind("filler", [], 1)
        with rig.session.microbatch("filler"):
            logits_of(model, token_ids(1, 1))
        with pytest.raises(CheckError, match="layer 1, microbatch filler, forward pass"):
            rig.session.settle(recompute=False)


def test_settling_reduces_once_and_a_fault_on_another_rank_stops_this_one_too():
    calls: list[Tensor] = []

    def with_a_faulty_rank(local: Tensor) -> Tensor:
        calls.append(local.clone())
        return local + torch.nn.functional.one_hot(torch.tensor(0), len(local))

    with rigged(tiny_model("qwen3_moe")) as rig, torch.no_grad(), rig.session.holding({0: rig.trace(TOKENS)}):
        rig.session.bind("a", one_span(TOKENS), TOKENS)
        forward(rig, "a")
        with pytest.raises(CheckError, match=r"1 place\(s\) over all ranks.*on another rank"):
            rig.session.settle(recompute=False, reduce=with_a_faulty_rank)
        with pytest.raises(CheckError):
            rig.session.settle(recompute=False, reduce=with_a_faulty_rank)
    # A rank without a microbatch reduces a tensor of the same length: [faults, 3 counts, 3 times 3 layers].
    assert [len(local) for local in calls] == [13, 13]
    assert calls[0][0] == 0


def routes_of(seed: int = 0) -> MicrobatchRoutes:
    found = flat_map([2, 5])
    traces = {0: random_trace(found, 6, seed=seed)}
    return lay_out("m", one_span(6), 8, traces=traces, routing_map=found, device=CPU)


def shifted_by_a_token(ids_LRK: Tensor) -> Tensor:
    return ids_LRK.roll(1, dims=1)


def two_tokens_swapped(ids_LRK: Tensor) -> Tensor:
    return ids_LRK[:, [1, 0, *range(2, 8)]]


def slots_swapped(ids_LRK: Tensor) -> Tensor:
    return ids_LRK.flip(-1)


def layers_swapped(ids_LRK: Tensor) -> Tensor:
    return ids_LRK.flip(0)


def one_expert_changed(ids_LRK: Tensor) -> Tensor:
    changed = ids_LRK.clone()
    changed[1, 4, 1] ^= 1
    return changed


@pytest.mark.parametrize(
    "change", [shifted_by_a_token, two_tokens_swapped, slots_swapped, layers_swapped, one_expert_changed]
)
def test_the_digest_sees_every_rearrangement_of_the_routes(change: Callable[[Tensor], Tensor]):
    routes = routes_of()
    assert not torch.equal(routes.digest(change(routes.ids_LRK)), routes.digest_L)


def test_the_digest_does_not_look_at_rows_without_a_route():
    routes = routes_of()
    changed = routes.ids_LRK.clone()
    changed[:, 5:] = 7  # the unfed last token and two rows of padding
    assert torch.equal(routes.digest(changed), routes.digest_L)


def test_metrics_are_shares_of_replayed_rows_and_layers():
    found, routes = flat_map([2, 5]), routes_of()
    ledger = Ledger(found, CPU)
    ledger.enter(routes, grad=False)
    # Six tokens, five with a route. Layer 2 agrees fully; in layer 5, two rows lose one expert of two.
    live = routes.ids_LRK.clone()
    for row in (0, 3):
        live[1, row, 0] = next(e for e in range(8) if e not in live[1, row].tolist())
    for column in range(2):
        ledger.observe(
            routes, "forward", column, live_RK=live[column].flip(-1), used_RK=routes.ids_LRK[column]
        )
    metrics = ledger.settle(recompute=False)
    assert metrics.worst_layer == 5
    assert metrics.agreement_by_layer == pytest.approx((1.0, 4 / 5))
    assert metrics.published() == pytest.approx(
        {
            "routing/agreement": (5 + 4) / 10,
            "routing/agreement_worst_layer": 4 / 5,
            "routing/exact_rows": (5 + 3) / 10,
            "routing/group_conflict": 0.0,
            "routing/live_rows": 1 / 6,
            "routing/replayed_share": 1.0,
        }
    )


def test_a_replayed_row_with_an_expert_that_the_router_masked_is_a_conflict():
    found, routes = flat_map([2, 5]), routes_of()
    ledger = Ledger(found, CPU)
    ledger.enter(routes, grad=True)
    masked = torch.zeros(len(routes.valid_R), 8, dtype=torch.bool)
    masked[1, routes.ids_LRK[1, 1]] = True  # both experts of one row: one conflict
    masked[3, routes.ids_LRK[1, 3, 0]] = True
    masked[4, [e for e in range(8) if e not in routes.ids_LRK[1, 4].tolist()]] = True  # none that is replayed
    masked[5:] = True  # rows that are not replayed
    for phase in ("forward", "recompute"):
        for column in range(2):
            ids = routes.ids_LRK[column]
            ledger.observe(
                routes, phase, column, live_RK=ids, used_RK=ids, masked_RE=masked if column == 1 else None
            )
    metrics = ledger.settle(recompute=True)
    assert metrics.group_conflict == 2 / 10
