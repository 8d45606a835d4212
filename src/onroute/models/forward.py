"""One forward pass of a stock model over one microbatch."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from onroute.core.batches import PackedBatch


def logits_of(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Logits [B, S, V]; the entry at column s predicts the token at column s + 1 of its row.

    Without labels, so that the model adds no loss of its own, and never with a cache.
    """
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
    )
    logits: Tensor = output.logits
    return logits
