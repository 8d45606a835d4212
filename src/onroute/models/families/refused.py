"""Families that are known not to train under replay, and why.

A test holds this table to what the self-check says, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NO_HEAD: Final = "has no causal language-model head, so there is nothing to sample and train"
_ENCODER_DECODER: Final = (
    "an encoder-decoder that takes the largest score and drops tokens over an expert's capacity: "
    "a token's expert depends on the other tokens of the batch"
)

REFUSED: Final[Mapping[str, str]] = {
    "deepseek_v4": "its first layers look experts up by token id (hash routing): no top-k picks them",
    "diffusion_gemma": "a block-diffusion model: its decoder layers cannot be recomputed",
    "doge": "product keys: two calls of top-k combined, over scores that are mixed across tokens",
    "inkling_mm_model": "its vision tower cannot be built tiny; inkling_text is its language model",
    "nllb-moe": _ENCODER_DECODER,
    "openai_privacy_filter": _NO_HEAD,
    "phimoe": "sparsemixer: masked maxima, in training with Gumbel noise, and not a top-k",
    "pi0": _NO_HEAD,
    "pi05": _NO_HEAD,
    "qwen3_omni_moe": "has no forward of its own; qwen3_omni_moe_thinker is its language model",
    "switch_transformers": _ENCODER_DECODER,
}
"""Model type -> reason."""
