"""The demo's model is an ordinary folder, the same for a seed down to the last byte."""

from __future__ import annotations

from pathlib import Path

import torch

from onroute.models.demo import CHARACTERS, build_demo_model
from onroute.models.load import context_length, load_plain, load_tokenizer, read_config, stop_token_ids
from onroute.models.packing import packing_leak
from onroute.routing.discovery import discover


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_leaves_the_generator_alone(tmp_path: Path):
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    torch.manual_seed(5)
    count = build_demo_model(one, seed=3)
    drawn = torch.rand(1)
    assert build_demo_model(two, seed=3) == count
    build_demo_model(other, seed=4)
    assert contents(one) == contents(two)
    assert {n for n, data in contents(one).items() if data != contents(other)[n]} == {"model.safetensors"}
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


def test_the_folder_loads_as_any_other_and_routes(tmp_path: Path):
    count = build_demo_model(tmp_path, seed=0)
    model = load_plain(tmp_path, dtype=torch.float32, attention="sdpa", experts="grouped_mm")
    assert sum(p.numel() for p in model.parameters()) == count
    assert context_length(read_config(tmp_path)) == 64
    assert packing_leak(model, torch.device("cpu")) < 1e-5
    routers = discover(model, lambda: model(torch.arange(16)[None], use_cache=False))
    assert (routers.layers, routers.num_experts, routers.top_k) == ((0, 1, 2), 8, 2)


def test_every_character_is_one_token_and_comes_back(tmp_path: Path):
    build_demo_model(tmp_path, seed=0)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer(CHARACTERS)["input_ids"] == list(range(16))
    assert tokenizer("^a120=21$")["input_ids"] == [2, 3, 7, 8, 6, 5, 8, 7, 1]
    assert tokenizer.decode([2, 3, 7, 8, 6, 5, 8, 7, 1]) == "^a120=21$"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert stop_token_ids(tmp_path, tokenizer) == (1,)
