"""The one definition of a token's log-probability, for trainer, reference model and engine alike."""

from __future__ import annotations

import math

import torch

from onroute.core.errors import UserError


def token_log_probs(logits: torch.Tensor, targets: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature) at the target, in float32; 0 where the target is negative.

    logits: [..., V], left as they are. targets: int64 [...], a negative one asks for nothing.
    Logits [2, 0] at temperature 0.5 give token 0 the log-prob -0.01815.

    Raises:
        UserError: the temperature is not a positive finite number; greedy choice has no log-probs.
    """
    if not 0.0 < temperature < math.inf:
        raise UserError(
            "algorithms-temperature",
            f"temperature is {temperature}",
            "log-probs of sampled tokens",
            "set engine.temperature above 0",
        )
    asked = targets >= 0
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, torch.where(asked, targets, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(asked, chosen - scaled.logsumexp(dim=-1), 0.0)
