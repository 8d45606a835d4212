from __future__ import annotations

import math

import pytest
import torch

from onroute.algorithms.catalog import ClippedOptions
from onroute.algorithms.losses.base import LossInputs
from onroute.algorithms.losses.clipped import clipped

NAN, INF = float("nan"), float("inf")
PPO = ClippedOptions(clip_low=0.2, clip_high=0.2)


def run(ratios, advantages, options=PPO):
    log_probs = torch.tensor([math.log(r) for r in ratios], requires_grad=True)
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=torch.zeros(len(ratios)),
        advantages=torch.tensor(advantages),
        mask=torch.ones(len(ratios), dtype=torch.bool),
    )
    terms = clipped(inputs, options)
    terms.per_token.sum().backward()
    return terms, log_probs.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # d(-r A)/dlogp = -r A
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.2, 0.0),  # clipped above
        (0.5, 1.0, -0.5, -0.5),  # a good token that fell is pulled back
        (0.5, -1.0, 0.8, 0.0),  # max(0.5, 0.8)
        (1.5, -1.0, 1.5, 1.5),  # a bad token that rose is pushed down
        (10.0, -1.0, 10.0, 10.0),
    ],
)
def test_loss_and_gradient_by_hand(ratio, advantage, loss, gradient):
    terms, grad = run([ratio], [advantage])
    assert terms.per_token.item() == pytest.approx(loss, rel=1e-5)
    assert grad.item() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss"),
    [
        (10.0, -1.0, None, 10.0),
        (10.0, -1.0, 3.0, 3.0),
        (0.5, -1.0, None, 0.8),
        (0.5, -1.0, 3.0, 0.8),
        (10.0, 1.0, 3.0, -1.2),
        (10.0, 1.0, None, -1.2),
    ],
)
def test_dual_clip_bounds_bad_tokens_only(ratio, advantage, dual, loss):
    options = ClippedOptions(clip_low=0.2, clip_high=0.2, dual_clip=dual)
    terms, grad = run([ratio], [advantage], options)
    assert terms.per_token.item() == pytest.approx(loss, rel=1e-5)
    assert terms.sums["dual_clip_fraction"].item() == (loss == 3.0)
    assert grad.item() == pytest.approx(10.0 if loss == 10.0 else 0.0, rel=1e-5)


@pytest.mark.parametrize(
    ("changed", "ratio", "advantage"),
    [({"clip_low": 0.3}, 0.5, -1.0), ({"clip_high": 0.4}, 2.0, 1.0), ({"dual_clip": 2.0}, 9.0, -1.0)],
)
def test_turning_an_option_changes_the_loss(changed, ratio, advantage):
    before, _ = run([ratio], [advantage], ClippedOptions())
    after, _ = run([ratio], [advantage], ClippedOptions(**changed))
    assert before.per_token.item() != after.per_token.item()


def test_sums_count_tokens_and_add_up_the_log_ratio():
    terms, _ = run([1.5, 1.0, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0])
    assert terms.sums["clip_fraction"].item() == 2  # 1.5 going up, 0.5 going down
    # Σ(old - new) = -(log 1.5 + 0 + 2 log 0.5) = -(0.40547 - 1.38629)
    assert terms.sums["policy_k1"].item() == pytest.approx(0.98083, abs=1e-5)
    assert all(value.dtype == torch.float64 and value.dim() == 0 for value in terms.sums.values())


def test_whatever_lies_under_the_mask_changes_nothing():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(2, 4, generator=generator) for _ in range(3)]
    junk = torch.tensor([[0, 0, NAN, -INF], [INF, 0, 0, NAN]])
    dirty = [torch.where(mask, tensor, junk) for tensor in clean]
    results = []
    for log_probs, old, advantages in (clean, dirty):
        leaf = log_probs.clone().requires_grad_()
        inputs = LossInputs(log_probs=leaf, old_log_probs=old, advantages=advantages, mask=mask)
        terms = clipped(inputs, ClippedOptions(dual_clip=3.0))
        terms.per_token.sum().backward()
        results.append((terms, leaf.grad))
    (terms, grad), (dirty_terms, dirty_grad) = results
    assert torch.equal(terms.per_token, dirty_terms.per_token)
    assert torch.equal(grad, dirty_grad)
    assert grad[~mask].eq(0).all() and terms.per_token[~mask].eq(0).all()
    assert grad[mask].ne(0).any()
    assert {k: v.item() for k, v in terms.sums.items()} == {k: v.item() for k, v in dirty_terms.sums.items()}


def test_a_log_ratio_that_would_overflow_is_bounded_and_counted():
    log_probs = torch.tensor([200.0, -200.0, 0.0], requires_grad=True)
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=torch.zeros(3),
        advantages=torch.tensor([1.0, -1.0, 1.0]),
        mask=torch.ones(3, dtype=torch.bool),
    )
    terms = clipped(inputs, ClippedOptions())
    terms.per_token.sum().backward()
    assert terms.per_token.isfinite().all() and log_probs.grad.isfinite().all()
    assert terms.sums["ratio_clamped"].item() == 2


def test_a_bad_token_far_above_its_old_probability_has_a_finite_loss():
    log_probs = torch.tensor([200.0], requires_grad=True)
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=torch.zeros(1),
        advantages=torch.tensor([-1.0]),
        mask=torch.ones(1, dtype=torch.bool),
    )
    terms = clipped(inputs, ClippedOptions())
    terms.per_token.sum().backward()
    assert terms.per_token.item() == pytest.approx(math.exp(20), rel=1e-5)
    assert log_probs.grad.item() == 0.0


def test_a_loss_token_that_is_not_finite_stays_visible():
    inputs = LossInputs(
        log_probs=torch.tensor([NAN, 0.0]),
        old_log_probs=torch.zeros(2),
        advantages=torch.ones(2),
        mask=torch.ones(2, dtype=torch.bool),
    )
    assert clipped(inputs, ClippedOptions()).per_token.isnan().tolist() == [True, False]


def test_gradient_flows_through_the_new_log_probs_only():
    leaves = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    inputs = LossInputs(
        log_probs=leaves[0],
        old_log_probs=leaves[1],
        advantages=leaves[2] + 1,
        mask=torch.ones(2, dtype=torch.bool),
    )
    terms = clipped(inputs, ClippedOptions())
    terms.per_token.sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is None and leaves[2].grad is None
    assert not any(value.requires_grad for value in terms.sums.values())


def test_bfloat16_inputs_are_computed_in_float32():
    inputs = LossInputs(
        log_probs=torch.tensor([-1.0], dtype=torch.bfloat16),
        old_log_probs=torch.tensor([-1.01]),
        advantages=torch.ones(1, dtype=torch.float64),
        mask=torch.ones(1, dtype=torch.bool),
    )
    loss = clipped(inputs, ClippedOptions()).per_token
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(0.01), rel=1e-6)
