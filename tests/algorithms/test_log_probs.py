from __future__ import annotations

import math

import pytest
import torch

from onroute.algorithms.log_probs import token_log_probs
from onroute.core.errors import UserError


def test_log_probs_are_those_of_the_tempered_distribution():
    logits = torch.tensor([2.0, 0.0])
    # -log(1 + e^-4) = -0.01815 after temperature 0.5; -log(1 + e^-2) = -0.12693 at 1
    assert token_log_probs(logits, torch.tensor(0), temperature=0.5).item() == pytest.approx(
        -0.01815, abs=1e-5
    )
    assert token_log_probs(logits, torch.tensor(0), temperature=1.0).item() == pytest.approx(
        -0.12693, abs=1e-5
    )
    assert logits.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_without_log_probs_is_refused(temperature):
    with pytest.raises(UserError, match=r"engine\.temperature"):
        token_log_probs(torch.zeros(2), torch.tensor(0), temperature=temperature)


def test_ignored_targets_give_zero_and_no_gradient():
    logits = torch.zeros(3, 4, requires_grad=True)
    out = token_log_probs(logits, torch.tensor([1, -100, 3]), temperature=0.7)
    out.sum().backward()
    assert out.tolist() == pytest.approx([-math.log(4), 0.0, -math.log(4)])
    assert logits.grad[1].eq(0).all() and logits.grad[0].ne(0).all()


def test_bfloat16_logits_are_normalised_in_float32():
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = token_log_probs(logits, torch.arange(5), temperature=1.0)
    expected = logits.double().log_softmax(-1)[torch.arange(5), torch.arange(5)]
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), expected, atol=1e-5)


def test_logits_far_apart_do_not_overflow():
    out = token_log_probs(torch.tensor([1e4, 0.0]), torch.tensor(1), temperature=1.0)
    assert out.item() == -1e4
