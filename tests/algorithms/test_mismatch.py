from __future__ import annotations

import math

import pytest
import torch

from onroute.algorithms.mismatch import MismatchSums, sequence_k3

TRAINER = torch.tensor([[-1.0, -2.0, -0.5, float("nan")]])
ENGINE = torch.tensor([[-1.2, -0.5, -0.5, float("inf")]])
MASK = torch.tensor([[True, True, True, False]])
# differences trainer - engine: 0.2, -1.5, 0.0


def metrics_of(*parts):
    sums = MismatchSums("cpu")
    for trainer, engine, mask in parts:
        sums.add(trainer, engine, mask)
    return sums.metrics("mismatch")


def test_the_numbers_of_three_tokens_by_hand():
    metrics = metrics_of((TRAINER, ENGINE, MASK))
    weights = [math.exp(0.2), math.exp(-1.5), 1.0]
    expected = {
        "tokens": 3,
        "k1": 1.3 / 3,
        "k3": (math.exp(0.2) - 1.2 + math.exp(-1.5) + 0.5) / 3,
        "log_prob_abs_diff": 1.7 / 3,
        "log_prob_abs_diff_max": 1.5,
        "share_above_0.1": 2 / 3,
        "share_above_1": 1 / 3,
        "trainer_perplexity": math.exp(3.5 / 3),
        "engine_perplexity": math.exp(2.2 / 3),
        "effective_sample_size": sum(weights) ** 2 / (3 * sum(w * w for w in weights)),
    }
    assert metrics == pytest.approx({f"mismatch/{k}": v for k, v in expected.items()}, abs=1e-6)


def test_equal_log_probs_show_no_mismatch():
    metrics = metrics_of((ENGINE, ENGINE, MASK))
    assert metrics["mismatch/k3"] == metrics["mismatch/log_prob_abs_diff_max"] == 0
    assert metrics["mismatch/effective_sample_size"] == 1


def test_microbatches_and_ranks_give_the_numbers_of_the_whole():
    whole = metrics_of((TRAINER, ENGINE, MASK))
    cuts = [slice(0, 1), slice(1, 2), slice(2, 4)]
    assert metrics_of(*[(TRAINER[:, c], ENGINE[:, c], MASK[:, c]) for c in cuts]) == pytest.approx(whole)
    ranks = [MismatchSums("cpu", rank=rank, num_ranks=3) for rank in range(3)]
    for sums, c in zip(ranks, cuts, strict=True):
        sums.add(TRAINER[:, c], ENGINE[:, c], MASK[:, c])
    vectors = []
    for sums in ranks:
        sums.reduce(lambda vector: vectors.append(vector) or vector)
    for sums in ranks:
        sums.reduce(lambda _: torch.stack(vectors).sum(0))
        assert sums.metrics("mismatch") == pytest.approx(whole)


@pytest.mark.parametrize("values", [[float("nan"), -1.0], [-1.0, float("nan")]])
def test_a_nan_of_any_rank_shows_in_the_maximum(values):
    vectors = []
    for rank, value in enumerate(values):
        sums = MismatchSums("cpu", rank=rank, num_ranks=2)
        sums.add(torch.tensor([value]), torch.tensor([-1.5]), torch.tensor([True]))
        sums.reduce(lambda vector: vectors.append(vector) or vector)
    sums.reduce(lambda _: torch.stack(vectors).sum(0))
    assert math.isnan(sums.metrics("m")["m/log_prob_abs_diff_max"])


def test_without_tokens_there_are_no_means():
    assert metrics_of((TRAINER, ENGINE, torch.zeros_like(MASK))) == {"mismatch/tokens": 0.0}
    assert metrics_of() == {"mismatch/tokens": 0.0}
    assert metrics_of((TRAINER[:, :0], ENGINE[:, :0], MASK[:, :0])) == {"mismatch/tokens": 0.0}


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_not_finite_under_the_mask_shows(bad):
    trainer = torch.tensor([-1.0, bad, -1.0])
    metrics = metrics_of((trainer, torch.full((3,), -1.0), torch.ones(3, dtype=torch.bool)))
    assert not math.isfinite(metrics["mismatch/log_prob_abs_diff"])
    assert not math.isfinite(metrics["mismatch/log_prob_abs_diff_max"])
    assert not math.isfinite(metrics["mismatch/k3"])


def test_the_k3_of_sequences_adds_up_to_that_of_the_tokens():
    trainer, engine, mask = TRAINER[0].numpy(), ENGINE[0].numpy(), MASK[0].numpy()
    total = metrics_of((TRAINER, ENGINE, MASK))["mismatch/k3"] * 3
    cuts = (slice(0, 2), slice(2, 4))
    parts = [sequence_k3(trainer[c][mask[c]], engine[c][mask[c]]) for c in cuts]
    assert sum(parts) == pytest.approx(total)
    assert sequence_k3(trainer[:0], engine[:0]) == 0.0
