"""What every policy loss takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

Options_contra = TypeVar("Options_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Four tensors of one shape, usually [B, S]; an entry belongs to the token at its position.

    log_probs: of the policy that trains; the only one that carries a gradient.
    old_log_probs: of the policy that sampled, or of the trainer before the first optimizer step.
    advantages: of each token.
    mask: bool, True on loss tokens. Other entries may hold anything, NaN included.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """per_token: float32, the loss of each token, 0 where masked. The loss of an optimizer step is
        the weighted sum over its tokens, see `onroute.algorithms.aggregation`.
    sums: 0-d float64 tensors without gradient, sums over loss tokens. Added up over microbatches and
        ranks and divided by the loss tokens of the step, they are the means called `train/<key>`.
    """

    per_token: torch.Tensor
    sums: Mapping[str, torch.Tensor]


class Loss(Protocol[Options_contra]):
    def __call__(self, inputs: LossInputs, options: Options_contra) -> LossTerms: ...


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum in float64 of the entries under the mask; the others may be NaN."""
    return torch.where(mask, values, 0).sum(dtype=torch.float64)
