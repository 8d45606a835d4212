"""Estimators of KL(a | b) from samples of a (http://joschu.net/blog/kl-approx.html).

Each takes the log-ratio x = log p_a - log p_b of sampled tokens, any shape, and is differentiable.
"""

from __future__ import annotations

import torch

MAX_EXPONENT = 20.0


def k1(log_ratio: torch.Tensor) -> torch.Tensor:
    """x: unbiased, signed, high variance; gradient 1."""
    return log_ratio


def k2(log_ratio: torch.Tensor) -> torch.Tensor:
    """x² / 2: biased, never negative, and its gradient x is an unbiased gradient of the KL."""
    return log_ratio.square() / 2


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """e^-x - 1 + x: unbiased, never negative; gradient 1 - e^-x. The exponent is bounded to ±20."""
    return torch.expm1((-log_ratio).clamp(-MAX_EXPONENT, MAX_EXPONENT)) + log_ratio
