"""Accuracy on held-out problems, with an interval, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z_95 = 1.959964


def evaluation_metrics(correct: Sequence[Sequence[bool]]) -> dict[str, float]:
    """`eval/accuracy` with its 95 % interval and `eval/pass@k` for k = 1, 2, 4 … samples.

    correct: for each problem, whether each of its samples was right. pass@k counts only problems
    that have the full number of samples. Without any sample the result is empty.
    """
    groups = [group for group in correct if len(group) > 0]
    if not groups:
        return {}
    low, high = accuracy_interval(groups)
    shares = [sum(group) / len(group) for group in groups]
    metrics = {
        "eval/accuracy": sum(shares) / len(shares),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
    }
    num_samples = max(len(group) for group in groups)
    complete = [sum(group) for group in groups if len(group) == num_samples]
    k = 1
    while k <= num_samples:
        rates = [pass_at_k(num_samples, num_correct, k) for num_correct in complete]
        metrics[f"eval/pass@{k}"] = sum(rates) / len(rates)
        k *= 2
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that one of k samples, drawn without replacement out of n of which c are right, is right.

    1 - prod_{j=n-c+1..n} (1 - k/j), the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374).
    """
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / j for j in range(num_samples - num_correct + 1, num_samples + 1))


def accuracy_interval(correct: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """95 % Wilson interval of the mean accuracy over problems.

    Samples of one problem are alike, so they do not count as independent: the sample size in
    Wilson's formula is the one at which independent samples would vary as the problems' means do.
    With one sample a problem it is Wilson's interval itself.
    """
    shares = [sum(group) / len(group) for group in correct]
    num_problems = len(shares)
    mean = sum(shares) / num_problems
    size = float(num_problems)
    if num_problems > 1 and 0.0 < mean < 1.0:
        spread = sum((share - mean) ** 2 for share in shares) / num_problems
        independent = sum(len(group) for group in correct)
        size = min(mean * (1 - mean) / (spread / num_problems), independent) if spread > 0 else independent
    z2 = _Z_95**2
    middle = (mean + z2 / (2 * size)) / (1 + z2 / size)
    half = _Z_95 / (1 + z2 / size) * math.sqrt(mean * (1 - mean) / size + z2 / (4 * size**2))
    return max(0.0, middle - half), min(1.0, middle + half)
