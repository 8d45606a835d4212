"""Finds out what an engine can do by letting it sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from onroute.core.engine import EngineCapabilities
from onroute.core.samples import Completion, SampleRequest, Tokens
from onroute.core.sampling import SamplingParams

_TEMPERATURE = 0.6


def probe_capabilities(
    name: str,
    model: PreTrainedModel,
    run_batch: Callable[[Sequence[SampleRequest]], list[Completion]],
    *,
    context_length: int,
) -> EngineCapabilities:
    """Samples two tokens at temperature 0.6 and compares them with a plain forward pass.

    Log-probs count as tempered when they lie closer to those of logits / 0.6 than to those of the
    logits as they are.
    """
    prompt = np.array([1, 0, 1], dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=2, temperature=_TEMPERATURE)
    (completion,) = run_batch([SampleRequest(id="probe", prompt_tokens=prompt, sampling=sampling, seed=0)])
    tempered, raw = (_log_probs(model, prompt, completion, t) for t in (_TEMPERATURE, 1.0))
    routing = completion.routing
    return EngineCapabilities(
        name=name,
        returns_routes=routing is not None,
        moe_layers=() if routing is None else routing.layers,
        num_experts=0 if routing is None else routing.num_experts,
        top_k=0 if routing is None else routing.top_k,
        tempered_log_probs=bool(
            np.abs(completion.log_probs - tempered).sum() <= np.abs(completion.log_probs - raw).sum()
        ),
        context_length=context_length,
    )


def _log_probs(
    model: PreTrainedModel, prompt: Tokens, completion: Completion, temperature: float
) -> NDArray[np.float32]:
    """Log-probs of the sampled tokens under softmax(logits / temperature), all in one forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64)).to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    picked: NDArray[np.float32] = log_probs.gather(-1, ids[len(prompt) :, None])[:, 0].cpu().numpy()
    return picked
