from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onroute.algorithms.aggregation import sample_weights


def test_token_mean_counts_every_token_the_same():
    assert sample_weights(np.array([4, 1]), "token_mean").tolist() == [0.2, 0.2]


def test_sample_mean_counts_every_sample_the_same():
    assert sample_weights(np.array([4, 1]), "sample_mean").tolist() == [1 / 8, 1 / 2]


def test_ranks_of_unequal_token_counts_give_the_mean_over_all_tokens():
    losses = [[1.0, 1.0, 1.0, 1.0], [5.0]]
    weights = sample_weights(np.array([4, 1]), "token_mean")
    per_rank = [weight * sum(tokens) for weight, tokens in zip(weights, losses, strict=True)]
    assert sum(per_rank) == pytest.approx(1.8)  # a mean of per-rank means would be 3.0
    weights = sample_weights(np.array([4, 1]), "sample_mean")
    assert sum(w * sum(t) for w, t in zip(weights, losses, strict=True)) == pytest.approx(3.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
@pytest.mark.parametrize("split", [[5], [2, 3], [3, 2], [1, 1, 1, 1, 1]])
def test_the_gradient_does_not_depend_on_microbatches(aggregation, split):
    """One parameter, five tokens of two samples (4 + 1); accumulated as microbatches of any split."""
    x = torch.tensor([0.3, -1.0, 2.0, 0.7, 5.0], dtype=torch.float64)
    per_token_weight = torch.from_numpy(sample_weights(np.array([4, 1]), aggregation)).repeat_interleave(
        torch.tensor([4, 1])
    )
    parameter = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for inputs, weights in zip(x.split(split), per_token_weight.split(split), strict=True):
        (weights * (parameter * inputs).square()).sum().backward()
    square = x.square().tolist()
    mean = sum(square) / 5 if aggregation == "token_mean" else (sum(square[:4]) / 4 + square[4]) / 2
    assert parameter.grad.item() == pytest.approx(2 * 2.0 * mean, rel=1e-6)


def test_samples_without_loss_tokens_count_for_nothing():
    assert sample_weights(np.array([4, 0, 4]), "token_mean").tolist() == [1 / 8, 0, 1 / 8]
    assert sample_weights(np.array([4, 0, 4]), "sample_mean").tolist() == [1 / 8, 0, 1 / 8]


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
def test_a_step_without_loss_tokens_has_all_zero_weights(aggregation):
    assert sample_weights(np.array([0, 0]), aggregation).tolist() == [0.0, 0.0]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.sampled_from(["token_mean", "sample_mean"]))
def test_the_weights_of_all_tokens_add_up_to_one(counts, aggregation):
    tokens = np.array(counts)
    total = float((sample_weights(tokens, aggregation) * tokens).sum())
    assert total == pytest.approx(1.0 if tokens.any() else 0.0)
