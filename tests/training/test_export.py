"""An exported run is an ordinary Hugging Face folder with the trainer's very weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from onroute.models.world import World
from onroute.training.export import export_model
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
