from __future__ import annotations

import math

import numpy as np
import pytest

from onroute.algorithms.bootstrap import bootstrap_difference, bootstrap_ratio
from onroute.core.errors import CheckError


def test_a_constant_ratio_has_an_interval_of_no_width():
    b = np.array([1.0, 2.0, 5.0])
    interval = bootstrap_ratio(3 * b, b, seed=0)
    assert (interval.value, interval.low, interval.high) == pytest.approx((3.0, 3.0, 3.0))


def test_the_ratio_is_that_of_the_sums_not_the_mean_of_ratios():
    assert bootstrap_ratio(np.array([1.0, 9.0]), np.array([1.0, 1.0]), seed=0).value == 5.0
    assert bootstrap_ratio(np.array([4.0, 2.0]), np.array([1.0, 2.0]), seed=0).value == 2.0


def test_the_interval_of_a_mean_is_close_to_the_normal_one():
    a = np.random.default_rng(0).normal(1.0, 2.0, size=400)
    interval = bootstrap_difference(a, np.zeros(400), seed=1, resamples=4000)
    half = 1.96 * a.std() / 20
    assert interval.value == pytest.approx(a.mean())
    assert interval.low == pytest.approx(a.mean() - half, abs=0.03)
    assert interval.high == pytest.approx(a.mean() + half, abs=0.03)


def test_pairing_removes_what_both_share():
    rng = np.random.default_rng(0)
    before = rng.normal(0, 10, size=100)
    interval = bootstrap_difference(before + 1.0, before, seed=0)
    assert (interval.low, interval.high) == pytest.approx((1.0, 1.0))


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    a, b = np.random.default_rng(0).random((2, 50))
    assert bootstrap_ratio(a, b, seed=3) == bootstrap_ratio(a, b, seed=3)
    assert bootstrap_ratio(a, b, seed=3) != bootstrap_ratio(a, b, seed=4)


def test_a_sum_of_zero_below_gives_an_infinite_ratio():
    interval = bootstrap_ratio(np.array([1.0, 2.0]), np.zeros(2), seed=0)
    assert interval.value == interval.low == interval.high == math.inf
    some = bootstrap_ratio(np.array([1.0, 2.0, 3.0]), np.array([0.0, 0.0, 1.0]), seed=0)
    assert some.value == 6.0 and some.high == math.inf and math.isfinite(some.low)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0])])
def test_what_is_not_paired_is_refused(a, b):
    with pytest.raises(CheckError, match="not pairs"):
        bootstrap_difference(np.array(a), np.array(b), seed=0)
