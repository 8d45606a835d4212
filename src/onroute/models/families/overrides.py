"""Settings of single families that the rules of `shrink.py` cannot know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_DOTS: Final[Mapping[str, int]] = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
OVERRIDES: Final[Mapping[str, Mapping[str, Any]]] = {
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "zaya": {"num_experts_per_tok": 1},
    "llama4": {"text_config": {"num_experts_per_tok": 1, "moe_layers": [0, 1, 2]}},
    "llama4_text": {"num_experts_per_tok": 1, "moe_layers": [0, 1, 2]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            }
        }
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
        }
    },
    "hy_v4_vl": {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        }
    },
    "gemma4": {"text_config": {"enable_moe_block": True, "global_head_dim": 16}},
    "gemma4_text": {"enable_moe_block": True, "global_head_dim": 16},
    "diffusion_gemma": {"text_config": {"global_head_dim": 16}},
    "mistral_large4": {"text_config": {"kv_source_layers": [0, 1, 2]}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0, "head_dim": 0, "index_topk": 8, "index_kpool": 2}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse"]}},
    "mistral4": {"head_dim": 16},
    "kolibri1_1": {"kv_source_layers": [0, 1, 2], "index_num_heads": 1},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2},
    "dots3_note": {"text_config": _DOTS},
    "dots3_note_text": _DOTS,
    "muse_spark": {
        "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 16, 32], "depths": [1, 1, 1, 1]},
        "out_hidden_size": 64,
    },
}
