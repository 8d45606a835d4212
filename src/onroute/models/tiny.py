"""Tiny, random models of real families, for tests and for checks that must cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from onroute.core.errors import UserError

MAX_PARAMETERS: Final = 30_000_000

_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_QWEN_EXPERTS: Final[Mapping[str, Any]] = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_DEEPSEEK: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}

TINY: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**_QWEN_EXPERTS, "norm_topk_prob": True},
    "qwen3_5_moe_text": {
        **_QWEN_EXPERTS,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "glm4_moe_lite": {**_DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
"""Settings of each family over the common ones: 3 layers, the first dense where the family has dense
layers, 8 experts, top 2."""


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Configuration of a tiny model; `changes` are settings of the family, e.g. `num_hidden_layers=12`.

    Raises:
        UserError: no tiny model of this family is known.
    """
    if model_type not in TINY:
        raise UserError(
            "models-tiny-unknown",
            f"no tiny model of type {model_type!r}",
            "models/tiny.py",
            f"use one of {', '.join(TINY)}",
        )
    return AutoConfig.for_model(model_type, **{**_COMMON, **TINY[model_type], **changes})


def tiny_model(
    model_type: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    config: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """A random model in eval mode whose routes vary from token to token. Leaves torch's generator alone.

    Raises:
        UserError: the configuration would have more than `MAX_PARAMETERS` parameters.
    """
    config = tiny_config(model_type) if config is None else config
    return random_model(lambda: _build(config), model_type, seed=seed, dtype=dtype)


def random_model(
    build: Callable[[], PreTrainedModel],
    model_type: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """What `build` makes, filled at random, in eval mode. Raises UserError as `tiny_model` does."""
    with torch.device("meta"):
        size = sum(p.numel() for p in build().parameters())
    if size > MAX_PARAMETERS:
        raise UserError(
            "models-tiny-size",
            f"the model would have {size:,} parameters, at most {MAX_PARAMETERS:,} are tiny",
            f"model type {model_type}",
            "shrink hidden_size, the vocabulary or the number of layers",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        _randomise(model)
    if dtype != torch.float32:  # a cast would also make complex buffers real
        nn.Module.to(model, dtype=dtype)
    nn.Module.train(model, False)
    return model


def _build(config: PretrainedConfig) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    return model


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Weights wide enough that routers do not tie; a bias that steers the choice of experts must matter."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.05)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.05)
