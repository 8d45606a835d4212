"""A few fixed tokens through a model, to watch it and to prove things on it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

PROBE_TOKENS = 12
PROBE_ROWS = 2


def probe_logits(model: PreTrainedModel, device: torch.device) -> Tensor:
    """Logits [rows, tokens, V] of a few fixed random tokens, the same on every rank."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (PROBE_ROWS, PROBE_TOKENS), generator=generator).to(device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits
