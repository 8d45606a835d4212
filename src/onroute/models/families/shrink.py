"""Settings that make any routing configuration tiny, by the names of its own attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import PreTrainedConfig

TEXT: Final[Mapping[str, Any]] = {
    "vocab_size": 128,
    "unpadded_vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
    "hidden_size": 64,
    "intermediate_size": 64,
    "ffn_hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "dense_intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "moe_hidden_size": 32,
    "router_hidden_size": 16,
    "num_experts_per_token": 2,
    "num_expert_group": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    # latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    # sparse attention
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "sliding_window": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "rel_extent": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    # recurrent layers
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
}
"""For a text model: 3 layers, 8 experts, top 2, under every name the families give these."""

TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 2,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
    "projection_hidden_dim": 32,
    "projection_intermediate_size": 32,
    "projector_hidden_size": 32,
    "adapter_in_dim": 32,
    "adapter_input_size": 32,
    "adapter_out_dim": 64,
    "downsample_hidden_size": 16,
    "moe_intermediate_size": 16,
    "head_dim": 16,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 64,
    "output_channels": 32,
    "downsample_channels": [32, 32],
    "vocab_size": 128,
    "num_position_embeddings": 16,
}
"""For whatever sees or hears: nothing is fed to it."""

_TOKEN_SUFFIXES: Final = ("_token_id", "_token_index")


def shrunk(config_class: type[PreTrainedConfig], own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a tiny configuration of this class; `own` goes over the rules, `text_config` and the
    like as mappings of their own."""
    default = config_class()
    parts = {name: getattr(default, name) for name in config_class.sub_configs}
    settings = _own_level(default, {key: value for key, value in own.items() if key not in parts})
    for name, part in parts.items():
        if part is not None:
            settings[name] = {**shrunk(type(part), own.get(name, {})), "model_type": part.model_type}
    return settings


def _own_level(default: PreTrainedConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    values = vars(default)
    known = {*values, *default.attribute_map}
    rules = TEXT if _reads_text(default) else TOWER
    settings: dict[str, Any] = {
        key: _as_given(values.get(default.attribute_map.get(key, key)), value)
        for key, value in rules.items()
        if key in known
    }
    if rules is TEXT and "kv_lora_rank" in known:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        if "head_dim" in known:
            settings["head_dim"] = settings["qk_rope_head_dim"]
    settings |= _special_tokens(default)
    settings |= own
    depth = settings.get("num_hidden_layers")
    return {**_layer_lists(default, depth), **settings} if depth else settings


def _as_given(default: object, value: object) -> object:
    """In the form of the default: some settings are lists, one entry for each kind of input."""
    if isinstance(default, list | tuple) and not isinstance(value, list):
        return [value] * len(default)
    return value


def _reads_text(default: PreTrainedConfig) -> bool:
    other = ("vision", "audio", "encoder")
    return "vocab_size" in vars(default) and not any(word in default.model_type for word in other)


def _special_tokens(default: PreTrainedConfig) -> dict[str, int]:
    """Tokens of images and the like: the last ones of the vocabulary."""
    names = [n for n in vars(default) if n.endswith(_TOKEN_SUFFIXES) and n[:3] not in ("pad", "bos", "eos")]
    last = TEXT["vocab_size"] - 1
    return {n: last - place for place, n in enumerate(names) if isinstance(getattr(default, n), int)}


def _layer_lists(default: PreTrainedConfig, depth: int) -> dict[str, list[Any]]:
    """Settings given layer by layer, cut to `depth` layers: one of every kind, then the last ones."""
    full = getattr(default, "num_hidden_layers", None)
    lists = {
        n: v for n, v in vars(default).items() if isinstance(v, list | tuple) and full and len(v) == full
    }
    if not lists:
        return {}
    kept = _one_of_each(list(zip(*lists.values(), strict=True)), depth)
    return {name: [value[i] for i in kept] for name, value in lists.items()}


def _one_of_each(kinds: Sequence[object], depth: int) -> list[int]:
    first: dict[str, int] = {}
    for place, kind in enumerate(kinds):
        first.setdefault(repr(kind), place)
    kept = sorted(first.values())[-depth:]
    rest = [i for i in range(len(kinds) - 1, -1, -1) if i not in kept]
    return sorted(kept + rest[: depth - len(kept)])
