"""How far trainer and engine disagree about the same sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Reduction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Sum of a tensor over all ranks; the identity on a single one."""

NOTICEABLE, LARGE = 0.1, 1.0
"""Differences of log-probs, in nats, whose share is reported."""

_SUMS = ("tokens", "k1", "k3", "abs", "noticeable", "large", "trainer", "engine", "weight", "weight_sq")


class MismatchSums:
    """Adds up over tokens, on the device and in float64; one reduction at the end serves all numbers.

    The largest difference of each rank has a slot of its own, so that a sum over ranks keeps it.
    A NaN or infinite log-prob under the mask makes the metrics NaN or infinite; nothing hides it.
    """

    def __init__(self, device: torch.device | str, *, rank: int = 0, num_ranks: int = 1) -> None:
        self._rank_slot = len(_SUMS) + rank
        self._vector = torch.zeros(len(_SUMS) + num_ranks, dtype=torch.float64, device=device)

    def add(self, trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> None:
        """Log-probs of one microbatch under trainer and engine, and its loss mask; all of one shape."""
        trainer = torch.where(mask, trainer.detach().double(), 0.0)
        engine = torch.where(mask, engine.detach().double(), 0.0)
        difference = trainer - engine
        size = difference.abs()
        weight = difference.exp()
        terms = (
            torch.ones_like(difference),
            -difference,
            torch.expm1(difference) - difference,
            size,
            (size > NOTICEABLE).double(),
            (size > LARGE).double(),
            trainer,
            engine,
            weight,
            weight.square(),
        )
        self._vector[: len(_SUMS)] += torch.stack([torch.where(mask, term, 0.0).sum() for term in terms])
        if size.numel():
            slot = self._vector[self._rank_slot]
            slot.copy_(torch.maximum(slot, size.max()))

    def reduce(self, sum_over_ranks: Reduction) -> None:
        """Make every rank hold the numbers of all; call once, after the last `add`."""
        self._vector = sum_over_ranks(self._vector)

    def metrics(self, prefix: str) -> dict[str, float]:
        """Plain numbers `<prefix>/...`; with no tokens only their count. Nats per token.

        With d = log p_trainer - log p_engine: k1 = mean -d and k3 = mean e^d - 1 - d estimate
        KL(engine | trainer); effective_sample_size = (Σ e^d)² / (n Σ e^2d), 1 when both agree.
        """
        values = self._vector.tolist()
        total = dict(zip(_SUMS, values, strict=False))
        tokens = total["tokens"]
        if tokens == 0:
            return {f"{prefix}/tokens": 0.0}
        return {
            f"{prefix}/tokens": tokens,
            f"{prefix}/k1": total["k1"] / tokens,
            f"{prefix}/k3": total["k3"] / tokens,
            f"{prefix}/log_prob_abs_diff": total["abs"] / tokens,
            f"{prefix}/log_prob_abs_diff_max": _largest(values[len(_SUMS) :]),
            f"{prefix}/share_above_{NOTICEABLE:g}": total["noticeable"] / tokens,
            f"{prefix}/share_above_{LARGE:g}": total["large"] / tokens,
            f"{prefix}/trainer_perplexity": _exp(-total["trainer"] / tokens),
            f"{prefix}/engine_perplexity": _exp(-total["engine"] / tokens),
            f"{prefix}/effective_sample_size": _ratio(total["weight"] ** 2, tokens * total["weight_sq"]),
        }


def sequence_k3(trainer: NDArray[np.float32], engine: NDArray[np.float32]) -> float:
    """Sum of k3 over the loss tokens of one sample, arrays [n]; the unit that a bootstrap resamples."""
    difference = trainer.astype(np.float64) - engine.astype(np.float64)
    return float((np.expm1(difference) - difference).sum())


def _largest(values: list[float]) -> float:
    """Python's max overlooks a NaN that does not come first."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _exp(value: float) -> float:
    return math.exp(value) if value < math.log(1e300) else math.inf


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
