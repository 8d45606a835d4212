from __future__ import annotations

import torch

from onroute.algorithms.losses.base import LossInputs
from onroute.algorithms.losses.supervised import supervised


def test_the_loss_is_the_negative_log_prob_of_loss_tokens():
    log_probs = torch.tensor([-0.5, float("nan"), -2.0], requires_grad=True)
    junk = torch.full((3,), float("nan"))
    mask = torch.tensor([True, False, True])
    terms = supervised(LossInputs(log_probs=log_probs, old_log_probs=junk, advantages=junk, mask=mask))
    terms.per_token.sum().backward()
    assert terms.per_token.tolist() == [0.5, 0.0, 2.0]
    assert log_probs.grad.tolist() == [-1.0, 0.0, -1.0]
    assert terms.sums["nll"].item() == 2.5
    assert not terms.sums["nll"].requires_grad
