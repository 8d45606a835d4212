"""A folder loads whole, or one line says what is wrong with it and where."""

from __future__ import annotations

import builtins
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from onroute.core.errors import UserError
from onroute.models.demo import build_demo_model
from onroute.models.load import (
    best_attention,
    context_length,
    load_plain,
    load_skeleton,
    load_tokenizer,
    read_config,
    stop_token_ids,
)
from onroute.models.names import PublishedLayout
from onroute.models.tiny import TINY, tiny_config
from tests.models.conftest import SavedModel

FLOAT32_ROUTERS = ("glm4_moe_lite", "deepseek_v3", "deepseek_v2")
"""Families that transformers keeps the routers of in float32, whatever dtype is asked for."""

WEIGHTS = "model.safetensors"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fails what asks the network or the terminal, and tells that it did: a caught exception hides."""
    asked: list[str] = []

    def refuse(*args: object) -> NoReturn:
        asked.append(repr(args))
        raise AssertionError(f"asked {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(builtins, "input", refuse)
    return asked


def load(folder: Path, *, attention: str = "sdpa", experts: str = "eager") -> PreTrainedModel:
    return load_plain(folder, dtype=torch.float32, attention=attention, experts=experts)


def refusal(action: Callable[[Path], object], folder: Path) -> str:
    """The one line; it names the folder."""
    with pytest.raises(UserError) as caught:
        action(folder)
    line = str(caught.value)
    assert "\n" not in line
    assert str(folder) in line
    assert len(line) < 1000
    return line


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("model_type", TINY)
def test_a_saved_model_loads_in_the_dtype_of_its_family_and_in_eval_mode(saved: SavedModel, model_type: str):
    folder = saved(model_type)
    model = load_plain(folder, dtype=torch.bfloat16, attention=best_attention(folder), experts="eager")
    assert not model.training
    kept = {name for name, p in model.named_parameters() if p.dtype != torch.bfloat16}
    routers = {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2)}
    assert kept == (routers if model_type in FLOAT32_ROUTERS else set())
    assert context_length(read_config(folder)) == 512
    skeleton = load_skeleton(folder, dtype=torch.bfloat16, attention=best_attention(folder), experts="eager")
    assert not skeleton.training
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    assert {n: (p.shape, p.dtype) for n, p in skeleton.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in model.named_parameters()
    }


def test_no_kernel_takes_the_place_of_a_forward_when_the_mode_changes(saved: SavedModel):
    """transformers would fetch them from its hub at load, and put them in place in `train`."""
    folder = saved("qwen3_5_moe_text")
    model = load_plain(folder, dtype=torch.float32, attention="eager", experts="eager")
    router = model.get_submodule("model.layers.0.mlp.gate")
    router.__dict__["forward"] = mine = router.forward
    model.train().eval()
    assert not model.use_kernels
    assert router.__dict__["forward"] is mine


def test_a_skeleton_needs_no_weights(copied: SavedModel):
    folder = copied("qwen3_moe")
    (folder / WEIGHTS).unlink()
    assert load_skeleton(folder, dtype=torch.float32, attention="sdpa", experts="eager").training is False


def test_a_folder_that_is_not_there_or_holds_no_model_is_named(tmp_path: Path):
    assert "model folder does not exist" in refusal(load, tmp_path / "gone")
    assert "no model folder" in refusal(load, tmp_path)
    (tmp_path / "file").write_text("x")
    assert "[model-missing]" in refusal(load, tmp_path / "file")


@pytest.mark.parametrize("text", ["{not", "", "[]", "3", "null", "{}", '{"model_type": 3}', "\ufeff{"])
def test_a_config_that_is_none_is_refused(copied: SavedModel, text: str):
    folder = copied("qwen3_moe")
    (folder / "config.json").write_text(text)
    line = refusal(load, folder)
    assert line.startswith("[model-config]")
    assert "config.json" in line


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "phi99"}, "phi99"),
        ({"num_hidden_layers": "three"}, "'num_hidden_layers' expected int, got str (value: 'three')"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights can't be trained"),
        ({"hidden_act": "nope"}, "KeyError 'nope'"),
        ({"model_type": "t5"}, "T5Config"),
    ],
)
def test_a_config_that_no_model_fits_is_refused_by_name(
    copied: SavedModel, settings: dict[str, Any], named: str
):
    folder = copied("qwen3_moe")
    edit_json(folder / "config.json", **settings)
    assert named in refusal(load, folder)


def test_code_in_the_folder_is_neither_run_nor_asked_about(copied: SavedModel, alone: list[str]):
    folder = copied("qwen3_moe")
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit_json(folder / "config.json", model_type="own", auto_map=auto_map)
    (folder / "own.py").write_text("raise SystemExit('ran')")
    assert "custom code" in refusal(load, folder)
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}')
    refusal(load_tokenizer, folder)
    assert alone == []


def test_missing_weights_are_refused(copied: SavedModel, alone: list[str]):
    folder = copied("qwen3_moe")
    (folder / WEIGHTS).unlink()
    assert "no file named model.safetensors" in refusal(load, folder)
    assert alone == []


@pytest.mark.parametrize("kept", [0, 4, 1000, 100_000])
def test_truncated_weights_are_refused(copied: SavedModel, kept: int):
    folder = copied("qwen3_moe")
    whole = (folder / WEIGHTS).read_bytes()
    assert len(whole) > kept
    (folder / WEIGHTS).write_bytes(whole[:kept])
    assert "[model-load] the model can't be loaded: Error while deserializing header" in refusal(load, folder)


def test_a_file_missing_of_several_is_named(copied: SavedModel):
    folder = copied("qwen3_moe")
    load(folder).save_pretrained(folder, max_shard_size="200KB")
    (folder / WEIGHTS).unlink(missing_ok=True)
    files = sorted(folder.glob("model-*.safetensors"))
    load(folder)
    files[1].unlink()
    assert files[1].name in refusal(load, folder)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 missing tensor(s): model.norm.weight"),
        (lambda t: t.pop(EXPERT), f"1 mismatched tensor(s): {EXPERTS} [7, 64, 32] for [8, 64, 32]"),
        (lambda t: t.update(surplus=torch.ones(2)), "1 unexpected tensor(s): surplus"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            "1 mismatched tensor(s): model.norm.weight [3] for [64]",
        ),
        (lambda t: t.update({EXPERT: torch.ones(3, 3)}), f"1 unfit tensor(s): {EXPERTS}"),
    ],
    ids=["missing", "expert missing", "extra", "mismatched", "expert mismatched"],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    copied: SavedModel,
    capfd: pytest.CaptureFixture[str],
    edit: Callable[[dict[str, Tensor]], object],
    named: str,
):
    folder = copied("qwen3_moe")
    edit_weights(folder, edit)
    assert f"[model-weights] {named};" in refusal(load, folder)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kernel", [{"attention": "nope"}, {"experts": "nope"}])
def test_an_unknown_kernel_is_refused_before_weights_are_read(saved: SavedModel, kernel: dict[str, str]):
    folder = saved("qwen3_moe")
    kernels = {"attention": "sdpa", "experts": "eager", **kernel}
    assert "nope" in refusal(lambda folder: load(folder, **kernels), folder)
    assert "nope" in refusal(lambda folder: load_skeleton(folder, dtype=torch.float32, **kernels), folder)


@pytest.mark.parametrize(
    ("model_type", "best"), [("qwen3_moe", "sdpa"), ("deepseek_v3", "sdpa"), ("gpt_oss", "eager")]
)
def test_the_best_attention_is_one_the_family_loads_with(saved: SavedModel, model_type: str, best: str):
    folder = saved(model_type)
    assert best_attention(folder) == best
    assert isinstance(load(folder, attention=best), PreTrainedModel)


def test_a_folder_without_tokenizer_is_refused(saved: SavedModel, alone: list[str]):
    assert "[model-tokenizer]" in refusal(load_tokenizer, saved("qwen3_moe"))
    assert "[model-tokenizer]" in refusal(load_tokenizer, saved("gpt_oss"))
    assert alone == []


@pytest.mark.parametrize("text", ["{", "", '{"version": "1.0", "model": {"type": "Own"}}'])
def test_a_broken_tokenizer_is_refused(tmp_path: Path, text: str):
    build_demo_model(tmp_path, seed=0)
    (tmp_path / "tokenizer.json").write_text(text)
    assert "[model-tokenizer]" in refusal(load_tokenizer, tmp_path)


def demo_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    build_demo_model(folder, seed=0)
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.mark.parametrize(
    ("eos", "expected"), [([0, 9], (0, 9)), (9, (9,)), (0, (0,)), (None, (1,)), ([], (1,))]
)
def test_every_end_token_of_the_generation_config_stops_else_the_tokenizers_own(
    tmp_path: Path, eos: object, expected: tuple[int, ...]
):
    tokenizer = demo_tokenizer(tmp_path)  # ends with "$", id 1
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert stop_token_ids(tmp_path, tokenizer) == expected


def test_without_generation_config_the_tokenizer_ends_or_nothing_does(tmp_path: Path):
    tokenizer = demo_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(tmp_path, tokenizer) == (1,)
    tokenizer.eos_token = None
    assert stop_token_ids(tmp_path, tokenizer) == ()


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}'])
def test_a_broken_generation_config_is_refused(tmp_path: Path, text: str):
    tokenizer = demo_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    line = refusal(lambda folder: stop_token_ids(folder, tokenizer), tmp_path)
    assert "generation_config.json" in line


def test_a_model_that_also_sees_loads_and_gives_the_context_length_of_its_text(tmp_path: Path):
    text = {**tiny_config("qwen3_moe").to_dict(), "max_position_embeddings": 77}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model(
        "qwen3_vl_moe",
        text_config={**text, "model_type": "qwen3_vl_moe_text"},
        vision_config={**vision, "deepstack_visual_indexes": [], "num_position_embeddings": 16},
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    assert context_length(read_config(tmp_path)) == 77
    model = load(tmp_path)
    files = load_file(tmp_path / WEIGHTS)
    assert {s.name: s.shape for s in PublishedLayout(model).specs} == {
        name: tuple(tensor.shape) for name, tensor in files.items()
    }
