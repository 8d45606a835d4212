"""Whether a model keeps packed samples apart. Measured, not assumed: many do not, and say nothing."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from onroute.core.batches import PackedBatch
from onroute.core.errors import UserError
from onroute.models.forward import logits_of

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Nats by which a packed neighbour may move log-probs: the rounding of the compute type."""

_LENGTH = 24
"""Tokens per probe document; longer than the short convolutions that leak without attention."""


def packing_leak(model: PreTrainedModel, device: torch.device) -> float:
    """How far the logits of a packed document move when the document before it changes; 0 is right.

    In nats, the largest over tokens and vocabulary. A collective on a sharded model.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    first, other, second = torch.randint(0, vocabulary, (3, _LENGTH), generator=generator)
    positions = torch.arange(_LENGTH).repeat(2)[None].to(device)
    seen = []
    with torch.no_grad():
        for before in (first, other):
            ids = torch.cat([before, second])[None].to(device)
            batch = PackedBatch(
                layout="packed", input_ids=ids, position_ids=positions, attention_mask=None, spans=()
            )
            seen.append(logits_of(model, batch)[0, _LENGTH:].float().log_softmax(dim=-1))
    return float((seen[0] - seen[1]).abs().max())


def packing_refusal(model: PreTrainedModel, device: torch.device, *, tolerance: float) -> str | None:
    """Why this model can't train on packed samples, or None when it can."""
    try:
        leak = packing_leak(model, device)
    except ValueError as error:
        return str(error).splitlines()[0]
    if leak > tolerance:
        return f"log-probs of a sample move by {leak:.2g} when the sample before it changes"
    return None


def require_packing(model: PreTrainedModel, device: torch.device, *, tolerance: float) -> None:
    """Raises UserError when packed samples would see each other in this model."""
    reason = packing_refusal(model, device, tolerance=tolerance)
    if reason is not None:
        raise UserError(
            "model-packing",
            f"packed samples are not kept apart: {reason}",
            type(model).__name__,
            'set data.layout = "rows"',
        )
