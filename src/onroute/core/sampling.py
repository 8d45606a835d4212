"""How tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of one sampling request.

    `temperature` divides the logits before everything else; log-probs are those of the tempered
    distribution before `top_p` and `top_k` cut it, on the engine's side as in training.
    A `temperature` of 0 is greedy decoding and is for evaluation only.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
