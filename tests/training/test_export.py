"""An exported run is an ordinary Hugging Face folder with the trainer's very weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from onroute.models.world import World
from onroute.training.export import export_model, published_dtypes, write_model
from onroute.training.trainer import Trainer
from tests.training.builders import assert_same, batch_for, make_samples, parameters_of, run_config
from tests.training.conftest import FolderOf


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_the_stock_loader_reads_the_trained_weights_bit_for_bit(
    folder_of: FolderOf, world: World, tmp_path: Path, model_type: str
):
    origin = folder_of(model_type)
    attention = "eager" if model_type == "gpt_oss" else "sdpa"
    config = run_config(origin, model={"attention": attention}, routing={"replay": "off"})
    trainer = Trainer(config, world, total_steps=1)
    trainer.train(batch_for(config, make_samples(layers=None), world))
    export_model(trainer, origin, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert_same(parameters_of(loaded), parameters_of(trainer.model))
    buffers = dict(trainer.model.named_buffers())
    assert_same(dict(loaded.named_buffers()), buffers)


def test_an_export_replaces_the_one_before_and_leaves_nothing_else(moe: Path, world: World, tmp_path: Path):
    config = run_config(moe)
    trainer = Trainer(config, world, total_steps=1)
    export_model(trainer, moe, tmp_path / "model")
    trainer.train(batch_for(config, make_samples(), world))
    (tmp_path / "model" / "stale.json").write_text("{}")
    export_model(trainer, moe, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "stale.json").exists()
    again = Trainer(run_config(tmp_path / "model"), world, total_steps=1)
    assert_same(parameters_of(again.model), parameters_of(trainer.model))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
def test_a_model_in_several_files_is_read_like_one_in_one(
    folder_of: FolderOf, world: World, tmp_path: Path, model_type: str
):
    origin = folder_of(model_type)
    trainer = Trainer(run_config(origin, routing={"replay": "off"}), world, total_steps=1)
    dtypes = published_dtypes(origin, torch.float32)
    folder = tmp_path / "model"
    write_model(
        trainer.weights(), origin, folder, world, dtype=torch.float32, dtypes=dtypes, shard_bytes=100_000
    )
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert_same(parameters_of(loaded), parameters_of(trainer.model))


def test_what_a_family_keeps_in_float32_stays_so_in_bfloat16(
    folder_of: FolderOf, world: World, tmp_path: Path
):
    """deepseek_v3 adds a bias to its routers' scores that bfloat16 would round away."""
    origin = folder_of("deepseek_v3")
    trainer = Trainer(run_config(origin, routing={"replay": "off"}), world, total_steps=1)
    dtypes = published_dtypes(origin, torch.bfloat16)
    write_model(trainer.weights(), origin, tmp_path / "model", world, dtype=torch.bfloat16, dtypes=dtypes)
    written = load_file(tmp_path / "model" / "model.safetensors")
    kept = {name for name, tensor in written.items() if tensor.dtype == torch.float32}
    assert {name.partition(".mlp.gate.")[2] for name in kept} == {"weight", "e_score_correction_bias"}
    assert {tensor.dtype for tensor in written.values()} == {torch.float32, torch.bfloat16}


def test_an_export_that_fails_leaves_nothing(moe: Path, world: World, tmp_path: Path):
    trainer = Trainer(run_config(moe), world, total_steps=1)

    def failing() -> Iterator[dict[str, torch.Tensor]]:
        yield next(iter(trainer.weights()))
        raise OSError(28, "No space left on device")

    dtypes = published_dtypes(moe, torch.float32)
    with pytest.raises(OSError, match="No space left"):
        write_model(failing(), moe, tmp_path / "model", world, dtype=torch.float32, dtypes=dtypes)
    assert list(tmp_path.iterdir()) == []
