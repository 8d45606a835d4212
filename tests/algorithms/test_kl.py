from __future__ import annotations

import math

import pytest
import torch

from onroute.algorithms.kl import k1, k2, k3


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [(k1, 1.0, 1.0), (k2, 0.5, 1.0), (k3, math.exp(-1) - 1 + 1, 1 - math.exp(-1))],
)
def test_value_and_gradient_at_log_probs_minus_one_and_minus_two(estimator, value, gradient):
    log_prob = torch.tensor(-1.0, requires_grad=True)
    kl = estimator(log_prob - torch.tensor(-2.0))
    kl.backward()
    assert kl.item() == pytest.approx(value, abs=1e-4)  # k3: 0.3679
    assert log_prob.grad.item() == pytest.approx(gradient, abs=1e-4)  # k3: 0.6321


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_equal_policies_have_no_divergence(estimator):
    assert estimator(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", [k1, k3])
def test_unbiased_estimators_average_to_the_divergence(estimator):
    p, q = torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    assert (p * estimator((p / q).log())).sum().item() == pytest.approx(exact.item(), abs=1e-9)


def test_k3_of_a_log_ratio_far_below_zero_is_finite():
    x = torch.tensor(-500.0, requires_grad=True)
    k3(x).backward()
    assert k3(x).isfinite() and x.grad.isfinite()
