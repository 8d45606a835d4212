"""Supervised loss: learn the tokens that are given."""

from __future__ import annotations

import torch

from onroute.algorithms.losses.base import LossInputs, LossTerms, masked_sum


def supervised(inputs: LossInputs, options: None = None) -> LossTerms:
    """-log p of each loss token; old log-probs and advantages are not looked at.

    Sums: `nll`, the same in nats.
    """
    loss = torch.where(inputs.mask, -inputs.log_probs.float(), 0.0)
    return LossTerms(per_token=loss, sums={"nll": masked_sum(loss.detach(), inputs.mask)})
