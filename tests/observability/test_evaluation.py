from __future__ import annotations

from itertools import combinations

import pytest

from onroute.observability.evaluation import accuracy_interval, evaluation_metrics, pass_at_k


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 2), (4, 0, 4), (4, 4, 1), (6, 2, 3), (5, 3, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, c, k):
    subsets = list(combinations(range(n), k))
    hits = sum(any(i < c for i in subset) for subset in subsets)
    assert pass_at_k(n, c, k) == pytest.approx(hits / len(subsets))


def test_metrics_of_two_problems_worked_by_hand():
    metrics = evaluation_metrics([[True, False], [False, False]])
    assert metrics["eval/accuracy"] == 0.25  # (1/2 + 0) / 2
    assert metrics["eval/pass@1"] == 0.25
    assert metrics["eval/pass@2"] == 0.5  # one problem of two solved at least once
    assert metrics["eval/accuracy_low"] < 0.25 < metrics["eval/accuracy_high"]


def test_problems_with_samples_missing_count_for_accuracy_but_not_for_pass_at_k():
    metrics = evaluation_metrics([[True, True], [False]])
    assert metrics["eval/accuracy"] == 0.5
    assert metrics["eval/pass@2"] == 1.0


def test_without_samples_there_is_no_metric():
    assert evaluation_metrics([]) == {}
    assert evaluation_metrics([[], []]) == {}


def test_one_sample_a_problem_gives_the_textbook_wilson_interval():
    # p = .8, n = 10, z = 1.96: (.8 + z²/20 ± z sqrt(.16/10 + z²/400)) / (1 + z²/10)
    low, high = accuracy_interval([[True]] * 8 + [[False]] * 2)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_samples_of_one_problem_that_all_agree_add_no_certainty():
    single = accuracy_interval([[True]] * 8 + [[False]] * 2)
    fourfold = accuracy_interval([[True] * 4] * 8 + [[False] * 4] * 2)
    assert fourfold == pytest.approx(single)


def test_the_interval_has_a_width_when_all_are_right_or_all_wrong():
    low, high = accuracy_interval([[True]] * 10)
    assert (low, high) == (pytest.approx(0.7225, abs=1e-3), pytest.approx(1.0))  # 10 / (10 + 1.96²)
    low, high = accuracy_interval([[False, False]] * 10)
    assert (low, high) == (0.0, pytest.approx(0.2775, abs=1e-3))
