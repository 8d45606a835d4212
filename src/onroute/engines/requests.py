"""What every engine checks before a request costs anything, and before an answer is believed.

Requests that cannot be served are refused one by one; their neighbours in a batch never notice.
"""

from __future__ import annotations

import numpy as np

from onroute.core.errors import CheckError, UserError
from onroute.core.samples import Completion, SampleRequest


def check_request(request: SampleRequest, *, context_length: int, vocab_size: int) -> None:
    """Raises UserError when `request` cannot be served, naming it."""
    where = f"request {request.id}"
    num_prompt, sampling = len(request.prompt_tokens), request.sampling
    if num_prompt == 0:
        raise UserError("engine-empty-prompt", "the prompt has no tokens", where, "give at least one token")
    low, high = int(request.prompt_tokens.min()), int(request.prompt_tokens.max())
    if low < 0 or high >= vocab_size:
        raise UserError(
            "engine-prompt-ids",
            f"prompt ids reach from {low} to {high}, the model knows 0 to {vocab_size - 1}",
            where,
            "encode the prompt with the model's own tokenizer",
        )
    if num_prompt + sampling.max_new_tokens > context_length:
        raise UserError(
            "engine-context",
            f"{num_prompt} prompt + {sampling.max_new_tokens} new tokens exceed the context {context_length}",
            where,
            "lower engine.max_new_tokens or leave long prompts out",
        )
    for key, value, fits, rule in (
        ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature, 0 <= sampling.temperature < float("inf"), "0 or above"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k is None or sampling.top_k >= 1, "at least 1, or none"),
    ):
        if not fits:
            raise UserError("engine-sampling", f"{key} = {value}", where, f"{key} must be {rule}")


def check_completion(completion: Completion) -> None:
    """Raises CheckError when tokens and log-probs do not fit together or a log-prob is none."""
    where = f"request {completion.id}"
    if len(completion.tokens) != len(completion.log_probs):
        raise CheckError(
            "engine-log-probs",
            f"{len(completion.tokens)} tokens came with {len(completion.log_probs)} log-probs",
            where,
            "the engine must return the log-prob of every sampled token",
        )
    bad = np.flatnonzero(~(np.isfinite(completion.log_probs) & (completion.log_probs <= 0)))
    if bad.size:
        position = int(bad[0])
        raise CheckError(
            "engine-log-probs",
            f"log-prob {completion.log_probs[position]} of token {completion.tokens[position]}",
            f"{where}, new token {position}",
            'the model\'s logits are not finite; check the weights and try engine.dtype = "float32"',
        )
