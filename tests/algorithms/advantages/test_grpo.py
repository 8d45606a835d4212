from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onroute.algorithms.advantages.grpo import grpo
from onroute.algorithms.catalog import GrpoOptions
from onroute.core.errors import CheckError

PLAIN = GrpoOptions(normalize_std=False)


def batch(pairs):
    groups, rewards = zip(*pairs, strict=True)
    return np.array(rewards, dtype=np.float64), np.array(groups, dtype=np.int64)


def test_groups_of_any_size_in_any_order_are_centred_on_their_own_mean():
    shuffled = [(0, 1), (1, 5), (2, 2), (0, 0), (1, 5), (0, 1), (2, 0), (1, 5), (0, 0)]
    rewards, groups = batch(shuffled)
    values = grpo(rewards, groups, PLAIN).values
    assert values.tolist() == [0.5, 0, 1, -0.5, 0, 0.5, -1, 0, -0.5]


def test_normalising_divides_by_the_unbiased_std_of_the_group():
    rewards, groups = batch([(7, 1.0), (7, 0.0)])
    # mean 0.5, unbiased variance (0.25 + 0.25) / 1, std 0.70711; 0.5 / 0.70711 = 0.70711
    values = grpo(rewards, groups, GrpoOptions()).values
    assert values == pytest.approx([0.70711, -0.70711], abs=1e-5)
    assert values[0] == 0.5 / (0.5**0.5 + 1e-6)


@pytest.mark.parametrize("reward", [0.1 * i for i in range(1, 10)])
@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_give_exactly_zero(reward, normalize):
    for n in range(2, 17):
        out = grpo(np.full(n, reward), np.zeros(n, dtype=np.int64), GrpoOptions(normalize_std=normalize))
        assert out.values.tolist() == [0.0] * n
        assert out.metrics["rollout/zero_variance_groups"] == 1


def test_rewards_that_differ_by_rounding_only_are_equal():
    rewards, groups = batch([(0, 0.1 + 0.2), (0, 0.3)])
    assert rewards[0] != rewards[1]
    assert grpo(rewards, groups, GrpoOptions()).values.tolist() == [0.0, 0.0]


def test_rewards_that_differ_by_more_than_rounding_are_not_equal():
    rewards, groups = batch([(0, 0.3), (0, 0.3001)])
    assert (grpo(rewards, groups, GrpoOptions()).values != 0).all()


def test_a_group_of_one_gets_zero_and_is_counted():
    rewards, groups = batch([(0, 1.0), (1, 3.0), (1, 1.0)])
    out = grpo(rewards, groups, PLAIN)
    assert out.values.tolist() == [0.0, 1.0, -1.0]
    assert out.metrics["rollout/single_sample_groups"] == 1
    assert out.metrics["rollout/zero_variance_groups"] == 0


def test_mean_and_std_are_over_all_samples():
    rewards, groups = batch([(0, 1.0), (0, 0.0), (1, 1.0), (1, 2.0)])
    metrics = grpo(rewards, groups, PLAIN).metrics
    assert metrics["rollout/reward_mean"] == 1.0
    assert metrics["rollout/reward_std"] == pytest.approx(0.5**0.5)  # deviations 0, -1, 0, 1


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), None])
def test_a_reward_that_is_no_number_is_refused_by_sample(reward):
    rewards = np.array([1.0, 0.0, reward], dtype=object)
    with pytest.raises(CheckError, match=r"sample 2 of the batch \(1 such of 3\)"):
        grpo(rewards, np.zeros(3, dtype=np.int64), PLAIN)


def test_a_sample_without_a_group_is_refused():
    with pytest.raises(CheckError, match="group number is -1; sample 1"):
        grpo(np.zeros(2), np.array([0, -1]), PLAIN)


@pytest.mark.parametrize(("rewards", "groups"), [([], []), ([1.0], [0, 0])])
def test_what_is_no_batch_is_refused(rewards, groups):
    with pytest.raises(CheckError, match="do not describe a batch"):
        grpo(np.array(rewards), np.array(groups, dtype=np.int64), PLAIN)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=1, max_size=20), st.randoms())
def test_the_order_of_samples_does_not_matter(pairs, random):
    order = list(range(len(pairs)))
    random.shuffle(order)
    rewards, groups = batch(pairs)
    there = grpo(rewards, groups, PLAIN).values[order]
    shuffled = grpo(rewards[order], groups[order], PLAIN).values
    assert shuffled == pytest.approx(there, abs=1e-9)
