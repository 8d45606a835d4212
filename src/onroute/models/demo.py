"""The model of the demo: a tiny Qwen3-MoE with random weights and a tokenizer of 16 characters,
saved as an ordinary Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

CHARACTERS = "_$^ad=0123456789"
"""One token each: padding, end of answer, start of problem, the two directions, start of answer, digits."""


def build_demo_model(folder: Path, *, seed: int) -> int:
    """Write the model and its tokenizer to `folder`; the number of parameters.

    Sizes are those at which plain GRPO was measured to climb within 80 steps on one CPU core: one
    layer less learns as well, wider ones need a smaller learning rate than they have time for.
    """
    config = Qwen3MoeConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # type: ignore[call-arg]
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=CHARACTERS.index("_"),
        eos_token_id=CHARACTERS.index("$"),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, bos_token_id=None
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="_", eos_token="$"
    )
