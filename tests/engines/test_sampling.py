"""Drawing: the right distribution, the right log-prob, and nothing that was cut."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from onroute.core.samples import SampleRequest
from onroute.core.sampling import SamplingParams
from onroute.engines.sampling import RowSettings, cut, draw, uniforms_for

HALF = torch.tensor([0.5, 0.25, 0.25]).log()


def settings_of(vocab_size: int, *rows: dict[str, Any]) -> RowSettings:
    requests = [
        SampleRequest(
            id=str(i),
            prompt_tokens=np.ones(1, dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=1, **row),
            seed=i,
        )
        for i, row in enumerate(rows)
    ]
    return RowSettings.of(requests, vocab_size, torch.device("cpu"))


def drawn(logits: torch.Tensor, uniforms: list[float], **row: Any) -> tuple[list[int], list[float]]:
    settings = settings_of(len(logits), *[row] * len(uniforms))
    tokens, log_probs = draw(logits.expand(len(uniforms), -1), settings, torch.tensor(uniforms))
    return tokens.tolist(), log_probs.tolist()


def test_the_log_prob_is_that_after_temperature() -> None:
    # softmax([2, 0] / 0.5): log p0 = -log(1 + e^-4) = -0.01815; without temperature it would be -0.12693.
    tokens, log_probs = drawn(torch.tensor([2.0, 0.0]), [0.5], temperature=0.5)
    assert tokens == [0]
    assert log_probs[0] == pytest.approx(-0.01815, abs=1e-5)


def test_the_token_is_where_the_cumulated_probability_exceeds_the_uniform() -> None:
    # Cumulated: 0.5, 0.75, 1.
    tokens, log_probs = drawn(HALF, [0.0, 0.499, 0.5, 0.749, 0.75, 0.999])
    assert tokens == [0, 0, 1, 1, 2, 2]
    assert log_probs == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.25, 0.25)])


def test_evenly_spread_uniforms_draw_each_token_in_its_share() -> None:
    count = 1000
    tokens, _ = drawn(torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), [(i + 0.5) / count for i in range(count)])
    assert np.bincount(tokens).tolist() == [100, 200, 300, 400]


def test_top_k_redistributes_but_reports_the_uncut_log_prob() -> None:
    # Two of three left: shares 2/3 and 1/3, so 0.66 is still the first token and 0.67 the second.
    tokens, log_probs = drawn(HALF, [0.66, 0.67, 0.999], top_k=2)
    assert tokens == [0, 1, 1]
    assert log_probs == pytest.approx([math.log(0.5), math.log(0.25), math.log(0.25)])


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (1.0, 4)])
def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it(top_p: float, kept: int) -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])  # likeliest first: 0.4, 0.7, 0.9, 1
    left = cut(probs, torch.tensor([top_p]), torch.tensor([4]))[0]
    order = [1, 3, 2, 0]
    assert left.nonzero()[:, 0].tolist() == sorted(order[:kept])


def test_top_p_counts_in_what_top_k_left() -> None:
    # Of [0.4, 0.3] the first has 4/7 = 0.571: enough for 0.57, not for 0.58. Uncut it would have 0.4.
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).expand(2, -1)
    left = cut(probs, torch.tensor([0.57, 0.58]), torch.tensor([2, 2]))
    assert (left > 0).sum(dim=-1).tolist() == [1, 2]


def test_a_top_p_of_one_next_to_a_cut_row_loses_no_tail() -> None:
    probs = torch.full((2, 50_000), 1 / 50_000)
    left = cut(probs, torch.tensor([1.0, 0.5]), torch.tensor([50_000, 50_000]))
    assert (left[0] > 0).all()
    assert (left[1] > 0).sum().item() == pytest.approx(25_000, rel=1e-3)


def test_rows_with_different_settings_do_not_touch_each_other() -> None:
    rows = [{}, {"top_k": 1}, {"temperature": 0.0}, {"temperature": 2.0}, {"top_p": 0.6}]
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    uniforms = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.9])
    together = draw(logits, settings_of(40, *rows), uniforms)
    for i, row in enumerate(rows):
        tokens, log_probs = draw(logits[i : i + 1], settings_of(40, row), uniforms[i : i + 1])
        assert tokens[0] == together[0][i]
        assert log_probs[0] == together[1][i]


def test_temperature_zero_is_greedy_with_the_untempered_log_prob() -> None:
    tokens, log_probs = drawn(torch.tensor([0.0, 2.0]), [0.0, 0.99], temperature=0.0)
    assert tokens == [1, 1]
    assert log_probs == pytest.approx([-0.12693] * 2, abs=1e-5)


def test_the_largest_uniform_draws_a_token_that_has_probability() -> None:
    largest = float(np.nextafter(np.float32(1), np.float32(0)))
    logits = torch.full((1000,), 0.0)
    logits[500:] = -torch.inf
    tokens, log_probs = drawn(logits, [largest])
    assert tokens == [499]
    assert log_probs[0] == pytest.approx(-math.log(500), rel=1e-5)


@pytest.mark.parametrize("row", [{"top_k": 20}, {"top_p": 0.5}, {"top_k": 30, "top_p": 0.9}], ids=str)
def test_what_was_cut_is_never_drawn(row: dict[str, Any]) -> None:
    logits = torch.randn(800, generator=torch.Generator().manual_seed(0))
    settings = settings_of(800, row)
    left = cut(logits.softmax(-1)[None], settings.top_p, settings.top_k)[0]
    count = 500
    tokens, _ = drawn(logits, [i / count for i in range(count)], **row)
    assert set(tokens) <= set(left.nonzero()[:, 0].tolist())
    assert len(set(tokens)) > 5


def test_a_sum_that_wobbles_by_rounding_draws_no_token_without_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A parallel sum may give 0.50000006 at the second token, whose probability is 0.
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda *_, **__: torch.tensor([[0.5, 0.50000006, 1.0]]))
    logits = torch.tensor([0.5, 0.0, 0.5]).log()
    tokens, log_probs = drawn(logits, [0.5])
    assert tokens == [0]
    assert log_probs == pytest.approx([math.log(0.5)])


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, log_probs = drawn(logits, [0.3])
    assert log_probs[0] == pytest.approx(logits.float().log_softmax(-1)[tokens[0]].item(), abs=1e-6)


def test_uniforms_depend_on_the_seed_alone() -> None:
    long, short = uniforms_for(7, 10), uniforms_for(7, 3)
    assert np.array_equal(long[:3], short)
    assert not np.array_equal(long, uniforms_for(8, 10))
    assert long.dtype == np.float32
    many = uniforms_for(1, 100_000)
    assert 0 <= many.min() < many.max() < 1
    assert many.mean() == pytest.approx(0.5, abs=0.005)
