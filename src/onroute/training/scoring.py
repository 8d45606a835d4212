"""Log-probs of loss tokens, in one forward pass per microbatch, under replay or live."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onroute.algorithms.log_probs import token_log_probs
from onroute.models.forward import logits_of
from onroute.routing.session import ReplaySession
from onroute.training.microbatch import Microbatch


def loss_token_log_probs(model: PreTrainedModel, microbatch: Microbatch, temperature: float) -> Tensor:
    """Log-probs float32 [n] of the loss tokens under `temperature`, as the engine defines them.

    A filler gives an empty vector that still depends on every parameter, so that its backward pass
    takes part in the collectives of the other ranks.
    """
    logits = logits_of(model, microbatch.batch)
    if microbatch.positions.numel() == 0:
        return logits.flatten()[:0].float()
    predicting = logits.flatten(0, 1).index_select(0, microbatch.positions - 1)
    return token_log_probs(predicting, microbatch.targets, temperature=temperature)


def bound(
    session: ReplaySession | None, key: Hashable, microbatch: Microbatch
) -> AbstractContextManager[None]:
    """The context in which one forward pass over `microbatch` is replayed; without a session, live."""
    if session is None:
        return nullcontext()
    session.bind(key, microbatch.batch.spans, microbatch.batch.input_ids.numel())
    return session.microbatch(key)


Within: TypeAlias = Callable[[int, Microbatch], AbstractContextManager[None]]
"""The context of one forward pass, by the number of its microbatch."""


def under(session: ReplaySession | None) -> Within:
    """Replayed by `session`, or live without one."""
    return lambda number, microbatch: bound(session, ("score", number), microbatch)


@torch.no_grad()
def score(
    model: PreTrainedModel,
    microbatches: Sequence[Microbatch],
    *,
    within: Within,
    temperature: float,
) -> list[Tensor]:
    """Log-probs [n] of each microbatch, without gradients and without side effects on the model."""
    was_training = model.training
    model.train(False)
    try:
        scored = []
        for number, microbatch in enumerate(microbatches):
            with within(number, microbatch):
                scored.append(loss_token_log_probs(model, microbatch, temperature))
        return scored
    finally:
        model.train(was_training)
