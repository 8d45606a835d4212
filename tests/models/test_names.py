"""Parameters go out under the names, in the shapes and with the values of the files, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from onroute.core.errors import CheckError
from onroute.models.load import best_attention, load_plain, load_skeleton
from onroute.models.names import PublishedLayout
from onroute.models.tiny import TINY, tiny_config, tiny_model

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, dict(tiny_config(name).to_dict())) for name in TINY},
    "qwen3 tied": ("qwen3", {**tiny_config("qwen3").to_dict(), "tie_word_embeddings": True}),
    "qwen3_moe tied": ("qwen3_moe", {**tiny_config("qwen3_moe").to_dict(), "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {**_SMALL, "num_local_experts": 4}),
    "olmoe": ("olmoe", {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **_SMALL,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}


def build(name: str) -> PreTrainedModel:
    model_type, settings = MODELS[name]
    return tiny_model(model_type, config=AutoConfig.for_model(**{**settings, "model_type": model_type}))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_plain(folder, dtype=dtype, attention=best_attention(folder), experts="eager")


def published(model: PreTrainedModel) -> dict[str, Tensor]:
    """Copies: what is sent may be a view of the live weights."""
    return {n: tensor.clone() for part in PublishedLayout(model).tensors() for n, tensor in part.items()}


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_and_values_are_those_of_the_files(name: str, tmp_path: Path):
    made = build(name)
    made.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    for model in (made, load(tmp_path)):
        layout = PublishedLayout(model)
        assert {spec.name: spec.shape for spec in layout.specs} == shapes_of(files)
        assert {spec.dtype for spec in layout.specs} == {"float32"}
        order = [part for tensors in layout.tensors() for part in tensors]
        assert order == [spec.name for spec in layout.specs]
        sent = published(model)
        assert [n for n in files if not torch.equal(files[n], sent[n])] == []
    attention = best_attention(tmp_path)
    skeleton = load_skeleton(tmp_path, dtype=torch.float32, attention=attention, experts="eager")
    assert PublishedLayout(skeleton).specs == layout.specs


def test_the_gate_is_the_first_half_of_gate_up_worked_by_hand():
    """2 experts of 3 x 4: six tensors a layer, cut from [2, 6, 4] and [2, 4, 3]."""
    config = tiny_config("qwen3_moe", num_experts=2, moe_intermediate_size=3, hidden_size=4)
    model = tiny_model("qwen3_moe", config=config)
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj.copy_(torch.arange(48.0).reshape(2, 6, 4))
        experts.down_proj.copy_(torch.arange(24.0).reshape(2, 4, 3))
    prefix = "model.layers.1.mlp.experts."
    sent = {n.removeprefix(prefix): t.tolist() for n, t in published(model).items() if n.startswith(prefix)}
    assert sent == {
        "0.gate_proj.weight": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
        "0.up_proj.weight": [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22, 23]],
        "0.down_proj.weight": [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
        "1.gate_proj.weight": [[24, 25, 26, 27], [28, 29, 30, 31], [32, 33, 34, 35]],
        "1.up_proj.weight": [[36, 37, 38, 39], [40, 41, 42, 43], [44, 45, 46, 47]],
        "1.down_proj.weight": [[12, 13, 14], [15, 16, 17], [18, 19, 20], [21, 22, 23]],
    }


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite"])
def test_the_bias_that_steers_the_choice_of_experts_travels_too(model_type: str):
    sent = published(tiny_model(model_type))
    biases = [name for name in sent if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert all(sent[name].abs().max() > 0 for name in biases)


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen3_moe tied"])
def test_a_tied_head_travels_once(name: str):
    assert "lm_head.weight" not in published(build(name))
    assert "lm_head.weight" in published(build(name.removesuffix(" tied")))


def random_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


@pytest.mark.parametrize("name", MODELS)
def test_apply_is_the_inverse_into_a_model_of_another_dtype(name: str, tmp_path: Path):
    build(name).save_pretrained(tmp_path)
    model = load(tmp_path, torch.bfloat16)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    layout = PublishedLayout(model)
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in layout.specs}
    given = random_like(published(model))
    written = layout.apply(given)
    assert written == tuple(parameter.name for parameter in layout.parameters)
    held = published(model)
    assert [n for n, tensor in given.items() if not torch.equal(held[n], tensor.to(dtypes[n]))] == []
    after = model.state_dict()
    assert {key: value.dtype for key, value in after.items()} == {k: v.dtype for k, v in before.items()}
    assert [key for key in after if torch.equal(after[key], before[key])] == []


def test_a_pushed_model_computes_what_its_sender_does(tmp_path: Path):
    """Files of seed 0, weights of seed 1 pushed in: the same logits as seed 1, bit for bit."""
    sender = tiny_model("qwen3_moe", seed=1)
    tiny_model("qwen3_moe", seed=0).save_pretrained(tmp_path)
    receiver = load(tmp_path)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert not torch.equal(sender(tokens).logits, receiver(tokens).logits)
        PublishedLayout(receiver).apply(published(sender))
        sender.set_experts_implementation("eager")
        assert torch.equal(sender(tokens).logits, receiver(tokens).logits)


def test_a_bucket_writes_only_what_it_holds_strided_or_not():
    model = tiny_model("qwen3_moe")
    layout = PublishedLayout(model)
    before = published(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    experts = {n: t for n, t in before.items() if n.startswith("model.layers.2.mlp.experts.") and "down" in n}
    bucket = {name: torch.randn(64, 64).t(), **{n: torch.randn(32, 64).t() for n in experts}}
    assert layout.apply(bucket) == (name, "model.layers.2.mlp.experts.down_proj")
    after = published(model)
    assert {n for n in after if not torch.equal(after[n], before[n])} == bucket.keys()
    assert all(torch.equal(after[n], tensor) for n, tensor in bucket.items())


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.update(stranger=torch.ones(1)), r"unknown tensor\(s\) stranger;"),
        (lambda t: t.pop(EXPERT), rf"model\.layers\.1\.mlp\.experts\.gate_up_proj came without {EXPERT};"),
        (
            lambda t: t.update({EXPERT: torch.ones(32, 63)}),
            rf"{EXPERT} has shape \[32, 63\], this model holds \[32, 64\]",
        ),
        (
            lambda t: t.update({EXPERT: torch.ones(64, 32)}),
            rf"{EXPERT} has shape \[64, 32\], this model holds \[32, 64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(1)}),
            r"model\.norm\.weight has shape \[1\], this model holds \[64\]",
        ),
    ],
    ids=["unknown", "missing", "wrong shape", "transposed", "would broadcast"],
)
def test_what_does_not_belong_is_refused_by_name(change: Any, named: str):
    model = tiny_model("qwen3_moe")
    tensors = dict(published(model))
    change(tensors)
    with pytest.raises(CheckError, match=named) as caught:
        PublishedLayout(model).apply(tensors)
    assert "\n" not in str(caught.value)


def test_no_more_than_ten_names_are_listed():
    with pytest.raises(CheckError, match="unknown") as caught:
        PublishedLayout(tiny_model("qwen3")).apply({f"x{i:02}": torch.ones(1) for i in range(30)})
    assert "x09" in str(caught.value)
    assert "x10" not in str(caught.value)
