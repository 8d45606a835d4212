"""Small samples with every field filled."""

from __future__ import annotations

import numpy as np

from onroute.core.routing import RoutingTrace
from onroute.core.samples import Group, Prompt, Sample


def make_trace(num_tokens: int, *, seed: int = 0, layers=(1, 3), num_experts: int = 8, top_k: int = 2):
    rng = np.random.default_rng(seed)
    chosen = [[rng.permutation(num_experts)[:top_k] for _ in layers] for _ in range(num_tokens)]
    dtype = np.uint8 if num_experts <= 256 else np.uint16
    valid = np.ones(num_tokens, dtype=np.bool_)
    valid[-1] = False
    experts = np.array(chosen, dtype=dtype).reshape(num_tokens, len(layers), top_k)
    return RoutingTrace(experts=experts, layers=tuple(layers), num_experts=num_experts, valid=valid)


def make_sample(
    prompt_length: int,
    response_length: int,
    *,
    id: str = "s0",
    prompt_id: str = "p0",
    seed: int = 0,
    routed: bool = True,
    **changed,
) -> Sample:
    total = prompt_length + response_length
    rng = np.random.default_rng(seed)
    mask = np.arange(total) >= prompt_length
    values = {
        "id": id,
        "prompt_id": prompt_id,
        "tokens": rng.integers(0, 50, size=total).astype(np.int32),
        "prompt_length": prompt_length,
        "loss_mask": mask,
        "log_probs": np.where(mask, -rng.random(total), 0).astype(np.float32),
        "weight_versions": np.where(mask, 3, -1).astype(np.int32),
        "routing": make_trace(total, seed=seed) if routed else None,
        "reward": float(rng.random()),
        "stop_reason": "stop",
    }
    return Sample(**{**values, **changed})


def make_group(prompt_id: str, responses, *, seed: int = 0, routed=True, metadata=None) -> Group:
    tokens = np.array([5, 6, 7], dtype=np.int32)
    samples = tuple(
        make_sample(
            3, n, id=f"{prompt_id}/{i}", prompt_id=prompt_id, seed=seed + i,
            routed=routed if isinstance(routed, bool) else routed[i],
        )
        for i, n in enumerate(responses)
    )  # fmt: skip
    prompt = Prompt(id=prompt_id, tokens=tokens, text=f"text of {prompt_id}", metadata=metadata or {})
    return Group(prompt=prompt, samples=samples)
