"""95 % intervals by resampling whole sequences or problems (percentile bootstrap)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onroute.core.errors import CheckError


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with the 95 % interval `low` … `high` around it."""

    value: float
    low: float
    high: float


def bootstrap_ratio(
    a: NDArray[np.float64], b: NDArray[np.float64], *, seed: int, resamples: int = 1000
) -> Interval:
    """Σa / Σb of paired measurements [n]; infinite where Σb is 0, NaN where both are."""

    def ratio(picked: NDArray[np.int64]) -> float:
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.divide(a[picked].sum(), b[picked].sum()))

    return _bootstrap(a, b, ratio, seed=seed, resamples=resamples)


def bootstrap_difference(
    a: NDArray[np.float64], b: NDArray[np.float64], *, seed: int, resamples: int = 1000
) -> Interval:
    """mean(a - b) of paired measurements [n], e.g. accuracies per problem after and before training."""

    def difference(picked: NDArray[np.int64]) -> float:
        return float((a[picked] - b[picked]).mean())

    return _bootstrap(a, b, difference, seed=seed, resamples=resamples)


def _bootstrap(
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    statistic: Callable[[NDArray[np.int64]], float],
    *,
    seed: int,
    resamples: int,
) -> Interval:
    if a.ndim != 1 or a.shape != b.shape or a.size == 0:
        raise CheckError(
            "algorithms-bootstrap",
            f"arrays {list(a.shape)} and {list(b.shape)} are not pairs",
            "bootstrap interval",
            "give two arrays of one length, at least 1",
        )
    rng = np.random.default_rng(seed)
    drawn = [statistic(rng.integers(a.size, size=a.size)) for _ in range(resamples)]
    # No interpolation: between a number and infinity it would give NaN.
    low, high = np.quantile(drawn, 0.025, method="lower"), np.quantile(drawn, 0.975, method="higher")
    return Interval(value=statistic(np.arange(a.size)), low=float(low), high=float(high))
