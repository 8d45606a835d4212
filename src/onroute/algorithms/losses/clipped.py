"""Clipped policy loss: PPO (arXiv:1707.06347), DAPO's higher upper bound (arXiv:2503.14476) and the
dual clip (arXiv:1912.09729)."""

from __future__ import annotations

import torch

from onroute.algorithms.catalog import ClippedOptions
from onroute.algorithms.losses.base import LossInputs, LossTerms, masked_sum

MAX_LOG_RATIO = 20.0
"""exp(89) overflows float32, and the gradient through an infinite ratio is NaN even where it is clipped."""


def clipped(inputs: LossInputs, options: ClippedOptions) -> LossTerms:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(log p - log p_old).

    With `dual_clip` c and A < 0 the loss is at most -c A. The log-ratio is bounded to ±20 first; a
    token beyond that has no gradient and is counted in `ratio_clamped`.

    Sums: `clip_fraction` tokens where the clipped side won, `dual_clip_fraction` tokens at the dual
    bound, `ratio_clamped`, and `policy_k1`, the log-ratio log p_old - log p (its mean estimates
    KL(old | new)).
    """
    mask = inputs.mask
    difference = inputs.log_probs.float() - inputs.old_log_probs.detach().float()
    # A masked token has ratio 1 and advantage 0, thus loss 0 and no gradient.
    log_ratio = torch.where(mask, difference, 0.0)
    advantages = torch.where(mask, inputs.advantages.detach().float(), 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high) * advantages
    loss = torch.maximum(free, bounded)
    at_dual_bound = torch.zeros_like(mask)
    if options.dual_clip is not None:
        bound = -options.dual_clip * advantages
        at_dual_bound = (advantages < 0) & (loss > bound)
        loss = torch.where(at_dual_bound, bound, loss)
    clamped = log_ratio.detach().abs() > MAX_LOG_RATIO
    return LossTerms(
        per_token=loss,
        sums={
            "clip_fraction": masked_sum((bounded > free).double(), mask),
            "dual_clip_fraction": masked_sum(at_dual_bound.double(), mask),
            "ratio_clamped": masked_sum(clamped.double(), mask),
            "policy_k1": masked_sum(-log_ratio.detach(), mask),
        },
    )
