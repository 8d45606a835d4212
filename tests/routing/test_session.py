"""Every token takes its recorded route, whatever the layout and the order of the passes."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onroute.core.batches import TokenSpan
from onroute.core.errors import CheckError, UserError
from onroute.core.routing import RoutingTrace
from onroute.models.tiny import tiny_model
from onroute.routing.capture import RouteRecorder, trace_of
from onroute.routing.session import refuse_reentrant
from onroute.routing.wire import trace_from_engine_rows
from tests.routing.builders import (
    Rig,
    build,
    checkpointed,
    logits_of,
    one_span,
    rigged,
    token_ids,
    watched_choices,
)


def span(sample: int, offset: int, length: int) -> TokenSpan:
    return TokenSpan(sample=sample, offset=offset, length=length)


def rows_of(trace: RoutingTrace, column: int) -> list[list[int]]:
    return trace.experts[:, column].tolist()


def test_real_tokens_of_padded_rows_are_replayed_one_by_one_and_padding_stays_live():
    tokens = token_ids(2, 6)
    with rigged(tiny_model("qwen3_moe")) as rig, torch.no_grad():
        traces = {4: rig.trace(6, 1, last_valid=True), 9: rig.trace(3, 2, last_valid=True)}
        with watched_choices(rig) as live:
            logits_of(rig.model, tokens)
        with rig.session.holding(traces), watched_choices(rig) as used:
            rig.session.bind("mb", [span(4, 0, 6), span(9, 6, 3)], 12)
            with rig.session.microbatch("mb"):
                logits_of(rig.model, tokens)
            metrics = rig.session.settle(recompute=False)
    for column in range(3):
        assert used[column][:9].tolist() == rows_of(traces[4], column) + rows_of(traces[9], column)
        padding = used[column][9:]
        assert (padding[:, 0] != padding[:, 1]).all()
        assert 0 <= padding.min() <= padding.max() < 8
    assert torch.equal(used[0][9:], live[0][9:])  # before the first replaced expert, padding is as it was
    assert (metrics.replayed_share, metrics.live_rows) == (1.0, 0.0)


def test_rows_of_left_padded_samples_land_on_their_tokens_and_expert_0_is_an_expert():
    # Prompt 3 and response 4, left-padded to 6 and right-padded to 11: the 7 tokens lie at 3 … 9.
    with rigged(tiny_model("qwen3_moe")) as rig, torch.no_grad():
        trace = rig.trace(7)
        trace.experts[2] = [0, 5]
        with rig.session.holding({0: trace}), watched_choices(rig) as used:
            rig.session.bind("mb", [span(0, 3, 7)], 11)
            with rig.session.microbatch("mb"):
                logits_of(rig.model, token_ids(1, 11))
            metrics = rig.session.settle(recompute=False)
    for column in range(3):
        assert used[column][3:9].tolist() == rows_of(trace, column)[:6]
        assert used[column][5].tolist() == [0, 5]
    # Six of seven real tokens; the last one was never fed and is counted apart.
    assert metrics.replayed_share == 1.0
    assert metrics.live_rows == pytest.approx(1 / 7)


def test_columns_of_dense_layers_are_never_read():
    with rigged(tiny_model("deepseek_v3")) as rig, torch.no_grad():
        experts = rig.trace(6, 3).experts[:5]
        outputs = []
        for marker in (7, 0):
            wire = np.concatenate([np.full((5, 1, 2), marker), experts], axis=1)
            trace = trace_from_engine_rows(
                wire, num_tokens=6, layers=rig.map.layers, num_experts=8, sample_id="s"
            )
            with rig.session.holding({0: trace}), watched_choices(rig) as used:
                rig.session.bind("mb", one_span(6), 6)
                with rig.session.microbatch("mb"):
                    outputs.append(logits_of(rig.model, token_ids(1, 6)))
            assert [ids[:5].tolist() for ids in used] == [rows_of(trace, column)[:5] for column in range(2)]
    assert torch.equal(*outputs)


LAYOUTS = {"a": ([span(0, 0, 9)], (1, 9)), "b": ([span(1, 0, 5), span(2, 6, 4)], (2, 6)), "c": ([], (1, 1))}


def losses(rig: Rig) -> dict[str, Tensor]:
    """Forward passes of all three microbatches, before any backward pass."""
    found = {}
    for key, (spans, (batch, length)) in LAYOUTS.items():
        rig.session.bind(key, spans, batch * length)
        with rig.session.microbatch(key):
            found[key] = logits_of(rig.model, token_ids(batch, length, seed=ord(key))).logsumexp(-1).sum()
    return found


def gradients(rig: Rig, order: tuple[str, ...], *, recompute: bool) -> dict[str, Tensor]:
    rig.model.train()
    rig.model.zero_grad()
    traces = {i: rig.trace(length, i) for i, length in enumerate((9, 5, 4))}
    with rig.checkpointing(recompute), rig.session.holding(traces), watched_choices(rig) as used:
        waiting = losses(rig)
        for key in order:
            waiting[key].backward()
        rig.session.settle(recompute=recompute)
    assert len(used) == 3 * len(rig.map.sites) * (2 if recompute else 1)
    return {name: p.grad.clone() for name, p in rig.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_recompute_in_any_order_gives_the_gradients_of_a_run_without_it(
    model_type: str, order: tuple[str, ...]
):
    with rigged(tiny_model(model_type)) as rig:
        plain = gradients(rig, order, recompute=False)
        recomputed = gradients(rig, order, recompute=True)
    assert plain.keys() == recomputed.keys()
    assert max(float((plain[name] - recomputed[name]).abs().max()) for name in plain) == 0.0


def test_a_backward_pass_on_another_thread_finds_its_microbatch():
    with (
        rigged(tiny_model("qwen3_moe").train()) as rig,
        rig.checkpointing(True),
        rig.session.holding({0: rig.trace(9)}),
    ):
        rig.session.bind("mb", one_span(9), 9)
        with rig.session.microbatch("mb"):
            loss = logits_of(rig.model, token_ids(1, 9)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        rig.session.settle(recompute=True)


def test_a_recompute_uses_the_ids_of_its_forward_pass():
    with (
        rigged(tiny_model("qwen3_moe").train()) as rig,
        rig.checkpointing(True),
        rig.session.holding({0: rig.trace(9)}),
        watched_choices(rig) as used,
    ):
        rig.session.bind("mb", one_span(9), 9)
        with rig.session.microbatch("mb"):
            loss = logits_of(rig.model, token_ids(1, 9)).sum()
        loss.backward()
        rig.session.settle(recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(used[:3], reversed(used[3:]), strict=True))


def test_without_a_microbatch_the_model_is_live_and_nothing_is_counted():
    with rigged(tiny_model("qwen3_moe")) as rig, torch.no_grad():
        with rig.hooks.using(None):
            stock = logits_of(rig.model, token_ids(1, 5))
        with rig.session.holding({0: rig.trace(5)}):
            rig.session.bind("mb", one_span(5), 5)
            assert torch.equal(stock, logits_of(rig.model, token_ids(1, 5)))
            assert rig.session.settle(recompute=False).published() == {}


def test_a_live_pass_under_checkpointing_is_recomputed_live():
    with (
        rigged(tiny_model("qwen3_moe").train()) as rig,
        rig.checkpointing(True),
        rig.session.holding({0: rig.trace(5)}),
        watched_choices(rig) as used,
    ):
        rig.session.bind("mb", one_span(5), 5)
        with rig.session.microbatch("mb"):
            replayed = logits_of(rig.model, token_ids(1, 5)).sum()
        live = logits_of(rig.model, token_ids(1, 5)).sum()
        live.backward()
        replayed.backward()
        rig.session.settle(recompute=True)
    assert torch.equal(used[3], used[8])
    assert not torch.equal(used[3], used[0])


def test_nothing_of_a_failed_step_is_left_for_the_next():
    tokens = token_ids(1, 6)
    with rigged(tiny_model("qwen3_moe")) as rig, torch.no_grad():
        stale = rig.trace(6, 1)
        with pytest.raises(KeyboardInterrupt), rig.session.holding({0: stale}):
            rig.session.bind("mb", one_span(6), 6)
            with rig.session.microbatch("mb"):
                logits_of(rig.model, tokens)
                raise KeyboardInterrupt
        with pytest.raises(CheckError, match="routing-unbound"), rig.session.microbatch("mb"):
            pass
        with rig.session.holding({}), watched_choices(rig) as used:
            rig.session.bind("mb", one_span(6), 6)
            with rig.session.microbatch("mb"):
                logits_of(rig.model, tokens)
            metrics = rig.session.settle(recompute=False)
    assert metrics.live_rows == 1.0
    assert used[0][:5].tolist() != rows_of(stale, 0)[:5]


def test_microbatches_nest_and_the_outer_one_comes_back():
    with rigged(tiny_model("qwen3_moe")) as rig, torch.no_grad():
        with rig.session.holding({0: rig.trace(6, 1), 1: rig.trace(6, 2)}), watched_choices(rig) as used:
            rig.session.bind("outer", one_span(6, sample=0), 6)
            rig.session.bind("inner", one_span(6, sample=1), 6)
            with rig.session.microbatch("outer"):
                with rig.session.microbatch("inner"):
                    logits_of(rig.model, token_ids(1, 6))
                logits_of(rig.model, token_ids(1, 6))
            rig.session.settle(recompute=False)
        assert used[3][:5].tolist() == rows_of(rig.trace(6, 1), 0)[:5]


@pytest.mark.parametrize("use_reentrant", [True, None])
def test_reentrant_checkpointing_is_refused_by_name(use_reentrant: bool | None):
    with pytest.raises(UserError, match=r"routing-reentrant.*use_reentrant=False"):
        refuse_reentrant(use_reentrant)
    refuse_reentrant(False)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recompute_without_the_sessions_context_stops_instead_of_routing_live(use_reentrant: bool):
    model: Any = tiny_model("qwen3_moe").train()
    foreign = partial(checkpoint, use_reentrant=use_reentrant)
    with rigged(model) as rig, checkpointed(model, foreign), rig.session.holding({0: rig.trace(9)}):
        model.enable_input_require_grads()
        rig.session.bind("mb", one_span(9), 9)
        with rig.session.microbatch("mb"):
            loss = logits_of(model, token_ids(1, 9)).sum()
        with pytest.raises(CheckError, match="routing-foreign-recompute"):
            loss.backward()


@pytest.mark.parametrize(
    ("spans", "code"),
    [
        ([span(0, 0, 5)], "routing-span-length"),
        ([span(0, 5, 6)], "routing-span"),
        ([span(0, 0, 6), span(1, 5, 2)], "routing-span"),
        ([span(0, -1, 6)], "routing-span"),
    ],
    ids=["shorter than its trace", "beyond the rows", "overlapping", "before the rows"],
)
def test_spans_that_do_not_fit_are_refused(spans: list[TokenSpan], code: str):
    with (
        rigged(tiny_model("qwen3_moe")) as rig,
        rig.session.holding({0: rig.trace(6)}),
        pytest.raises(CheckError, match=rf"\[{code}\].*microbatch mb, sample"),
    ):
        rig.session.bind("mb", spans, 10)


def test_rows_that_the_model_does_not_get_are_refused_in_the_router():
    with rigged(tiny_model("qwen3_moe")) as rig, rig.session.holding({0: rig.trace(6)}):
        rig.session.bind("mb", one_span(6), 8)
        with (
            pytest.raises(CheckError, match=r"chooses \[7, 2\], the bound routes are \[8, 2\]; layer 0"),
            rig.session.microbatch("mb"),
        ):
            logits_of(rig.model, token_ids(1, 7))


def test_a_trace_of_another_model_is_refused_with_its_sample():
    with (
        rigged(tiny_model("deepseek_v3")) as rig,
        rigged(tiny_model("qwen3_moe")) as other,
        pytest.raises(CheckError, match=r"3 layers \(0, 1, 2\).*sample 5; the model has 2 layers \(1, 2\)"),
    ):
        rig.session.load({5: other.trace(6)})


def test_a_microbatch_is_bound_once_until_it_is_settled():
    with rigged(tiny_model("qwen3_moe")) as rig, torch.no_grad(), rig.session.holding({0: rig.trace(6)}):
        for _ in range(2):
            rig.session.bind("mb", one_span(6), 6)
            with rig.session.microbatch("mb"):
                logits_of(rig.model, token_ids(1, 6))
            with pytest.raises(CheckError, match="routing-rebound"):
                rig.session.bind("mb", one_span(6), 6)
            rig.session.settle(recompute=False)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "qwen3_moe"])
def test_experts_outside_the_live_groups_are_counted_for_routers_that_have_groups(model_type: str):
    tokens = token_ids(1, 8)
    groups = {"n_group": 4, "topk_group": 2} if model_type != "qwen3_moe" else {}
    with rigged(build(model_type, **groups)) as rig, torch.no_grad():
        with RouteRecorder(rig.hooks).recording() as record:
            logits_of(rig.model, tokens)
        shares = []
        for trace in (trace_of(record.ids, rig.map, num_tokens=8), rig.trace(8, last_valid=True)):
            with rig.session.holding({0: trace}):
                rig.session.bind("mb", one_span(8), 8)
                with rig.session.microbatch("mb"):
                    logits_of(rig.model, tokens)
                shares.append(rig.session.settle(recompute=False).group_conflict)
    assert shares[0] == 0.0  # what the router chose itself lies in its own groups
    assert (shares[1] > 0.3) == (model_type != "qwen3_moe")
