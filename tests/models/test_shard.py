"""A sharded model is the model in the files: on every rank, in every tensor, in what it computes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from onroute.core.config.sections import ModelConfig
from onroute.core.errors import UserError
from onroute.models import shard
from onroute.models.load import best_attention, load_plain, load_skeleton
from onroute.models.names import PublishedLayout
from onroute.models.shard import load_sharded, shard_units
from onroute.models.tiny import TINY, tiny_model
from onroute.models.world import World
from onroute.routing.selfcheck import self_check
from tests.models.conftest import SavedModel
from tests.ranks import run_world
from tests.routing.builders import rigged

TIED = {"tie_word_embeddings": True}
TOKENS = torch.arange(24).reshape(2, 12) * 5 % 128


def load(world: World, folder: Path, *, dtype: Any = "float32") -> PreTrainedModel:
    config = ModelConfig(path=str(folder), dtype=dtype, attention=best_attention(folder))
    return load_sharded(folder, config, world, reshard=True)


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_plain(folder, dtype=dtype, attention=best_attention(folder), experts="grouped_mm")


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def different_from_files(model: PreTrainedModel, folder: Path) -> list[str]:
    """Names of what is not bit for bit in the model as in the files; buffers that no file holds as in
    a plain model."""
    files = load_file(folder / "model.safetensors")
    published = {n: t for part in PublishedLayout(model).tensors() for n, t in part.items()}
    different = sorted(published.keys() ^ files.keys())
    different += [name for name in files if name in published and not same(files[name], published[name])]
    reference, buffers = dict(plain(folder).named_buffers()), dict(model.named_buffers())
    different += sorted(reference.keys() ^ buffers.keys())
    return different + [n for n, b in reference.items() if n in buffers and not same(b, buffers[n])]


def poison_fresh_memory() -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan()


def load_and_compare(world: World, folder: Path) -> list[str]:
    poison_fresh_memory()
    return different_from_files(load(world, folder), folder)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model_type", TINY)
def test_every_parameter_and_buffer_is_that_of_the_files(saved: SavedModel, model_type: str, size: int):
    assert run_world(size, load_and_compare, saved(model_type)) == [[]] * size


@pytest.mark.parametrize("settings", [TIED, {"hidden_size": 52, "vocab_size": 131, "head_dim": 14}])
def test_tied_and_uneven_sizes_arrive_whole_on_three_ranks(saved: SavedModel, settings: dict[str, Any]):
    assert run_world(3, load_and_compare, saved("qwen3_moe", **settings)) == [[]] * 3


def turn_buffers_round(model: nn.Module) -> None:
    """The same buffers registered in reverse order, in another dtype."""
    for module in model.modules():
        for name, buffer in reversed([*module._buffers.items()]):
            del module._buffers[name]
            module._buffers[name] = None if buffer is None else buffer.to(torch.bfloat16)


def load_with_turned_buffers(world: World, folder: Path) -> list[str]:
    def turned(*args: Any, **kwargs: Any) -> PreTrainedModel:
        model = load_skeleton(*args, **kwargs)
        turn_buffers_round(model)
        return model

    shard.load_skeleton = turned
    return load_and_compare(world, folder)


def test_buffers_of_other_dtype_and_order_become_those_of_rank_0(saved: SavedModel):
    assert run_world(2, load_with_turned_buffers, saved("deepseek_v3")) == [[], []]


def test_rotary_buffers_of_different_sizes_are_not_mixed_up(tmp_path: Path):
    config = AutoConfig.for_model(
        "gemma4_text",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=64,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    model = tiny_model("gemma4_text", config=config)
    sizes = {b.numel() for name, b in model.named_buffers() if name.endswith("inv_freq")}
    assert len(sizes) > 1
    model.save_pretrained(tmp_path)
    assert run_world(2, load_with_turned_buffers, tmp_path) == [[], []]


def load_own_folder(world: World, folders: list[Path]) -> list[str]:
    return different_from_files(load(world, folders[world.rank]), folders[0])


def test_only_rank_0_opens_weight_files(saved: SavedModel, tmp_path: Path):
    folder = saved("qwen3_moe", **TIED)
    shutil.copy(folder / "config.json", tmp_path)
    assert run_world(2, load_own_folder, [folder, tmp_path]) == [[], []]


def logits_and_shares(world: World, folder: Path) -> tuple[Tensor, float]:
    model = load(world, folder)
    local = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits, local / sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_two_ranks_hold_half_each_and_compute_what_one_process_does(saved: SavedModel, model_type: str):
    folder = saved(model_type)
    (one, share), (other, _) = run_world(2, logits_and_shares, folder)
    with torch.no_grad():
        expected = plain(folder)(TOKENS, use_cache=False).logits
    assert torch.equal(one, expected)
    assert torch.equal(other, expected)
    assert share == 0.5


def loss_of(model: PreTrainedModel) -> Tensor:
    logits = model(TOKENS, use_cache=False).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())


def train_tied(world: World, folder: Path) -> tuple[bool, Tensor, Tensor, Tensor, Tensor]:
    model = load(world, folder)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gradients = []
    before = full(embedding.weight.detach()).clone()
    for _ in range(3):
        loss_of(model).backward()
        gradients.append(full(embedding.weight.grad).clone())
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    names = ("lm_head.weight", "model.embed_tokens.weight")
    return head.weight is embedding.weight, gradients[0], before, *(full(state[n]) for n in names)


@pytest.mark.parametrize("size", [1, 2])
def test_tied_embeddings_stay_tied_and_get_the_whole_gradient(saved: SavedModel, size: int):
    folder = saved("qwen3", **TIED)
    reference = plain(folder)
    loss_of(reference).backward()
    for tied, gradient, before, head, embedding in run_world(size, train_tied, folder):
        assert tied
        assert (gradient - reference.get_input_embeddings().weight.grad).abs().max() <= 1e-6
        assert torch.equal(head, embedding)
        assert not torch.equal(before, embedding)


def units_of(model: PreTrainedModel, **options: Any) -> dict[str, list[str]]:
    """Unit -> parameters it gathers: each belongs to the first unit that holds it."""
    left = dict(model.named_parameters(remove_duplicate=False))
    units: dict[str, list[str]] = {}
    for unit in shard_units(model, **options):
        held = {id(p) for module in unit.modules for p in module.parameters()}
        units[unit.name] = sorted(name for name, p in left.items() if id(p) in held)
        left = {name: p for name, p in left.items() if id(p) not in held}
    assert left == {}
    return units


def test_an_untied_model_has_its_embeddings_and_its_head_in_units_of_their_own():
    units = units_of(tiny_model("qwen3_moe"))
    assert list(units) == ["layers.0", "layers.1", "layers.2", "embeddings", "head", "root"]
    assert units["embeddings"] == ["model.embed_tokens.weight"]
    assert units["head"] == ["lm_head.weight"]
    assert units["root"] == ["model.norm.weight"]
    assert all(name.startswith("model.layers.1.") for name in units["layers.1"])


def test_both_names_of_a_tied_embedding_are_in_the_last_unit(saved: SavedModel):
    units = units_of(plain(saved("qwen3", **TIED)))
    assert list(units) == ["layers.0", "layers.1", "layers.2", "root"]
    assert units["root"] == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_modules_kept_in_float32_are_units_before_the_layers_around_them():
    gate = "model.layers.1.mlp.gate"
    model = tiny_model("deepseek_v3")
    units = units_of(model, float32=[f"{gate}.weight"])
    assert list(units)[:2] == [gate, "layers.0"]
    assert units[gate] == [f"{gate}.weight"]
    assert [unit.name for unit in shard_units(model, [f"{gate}.weight"]) if unit.float32] == [gate]


def bfloat16_dtypes_and_logits(
    world: World, folder: Path
) -> tuple[set[torch.dtype], set[torch.dtype], Tensor]:
    model = load(world, folder, dtype="bfloat16")
    with torch.no_grad():
        logits = model(TOKENS, use_cache=False).logits
    loss_of(model).backward()
    gradients = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    return {p.dtype for p in model.parameters()}, gradients, logits


@pytest.mark.parametrize("model_type", TINY)
def test_bfloat16_computes_what_a_bfloat16_engine_does_from_float32_parameters(
    saved: SavedModel, model_type: str
):
    folder = saved(model_type)
    with torch.no_grad():
        expected = plain(folder, torch.bfloat16)(TOKENS, use_cache=False).logits
    for parameters, gradients, logits in run_world(2, bfloat16_dtypes_and_logits, folder):
        assert parameters == gradients == {torch.float32}
        assert logits.dtype == torch.bfloat16
        assert torch.equal(logits, expected)


def routing_report(world: World, folder: Path) -> tuple[list[int], list[str], int]:
    model = load(world, folder, dtype="bfloat16")
    with rigged(model) as rig:
        report = self_check(
            model,
            rig.hooks,
            rig.session,
            forward=lambda: model(TOKENS, use_cache=False).logits,
            checkpointing=rig.checkpointing,
        )
        report.require()
        return list(rig.map.layers), [site.module_name for site in rig.map.sites], len(report.rows)


def test_routers_in_units_of_their_own_are_still_found_and_replayed(saved: SavedModel):
    modules = ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]
    assert run_world(2, routing_report, saved("deepseek_v3")) == [([1, 2], modules, 5)] * 2


def refusal_of(world: World, folders: list[Path]) -> str:
    with pytest.raises(UserError) as caught:
        load(world, folders[world.rank])
    return str(caught.value)


def test_a_model_that_rank_0_cannot_read_ends_all_ranks_with_its_message(copied: SavedModel):
    folder = copied("qwen3_moe")
    (folder / "model.safetensors").write_bytes(b"half")
    one, other = run_world(2, refusal_of, [folder, folder])
    assert one == other
    assert one.startswith("[model-load] the model can't be loaded: Error while deserializing header")
    assert f"{folder} (rank 0)" in one


def test_a_model_that_rank_1_cannot_read_ends_all_ranks_with_its_message(saved: SavedModel, tmp_path: Path):
    gone = tmp_path / "gone"
    config = ModelConfig(path=str(gone), dtype="float32")
    one, other = run_world(2, refusal_on_rank_1, saved("qwen3_moe"), gone, config)
    assert one == other
    assert one.startswith("[model-missing] model folder does not exist")
    assert "(rank 1)" in one


def refusal_on_rank_1(world: World, folder: Path, gone: Path, config: ModelConfig) -> str:
    with pytest.raises(UserError) as caught:
        load_sharded(gone if world.rank == 1 else folder, config, world, reshard=True)
    return str(caught.value)


def refusal_of_a_leftover(world: World, folder: Path) -> str:
    def with_leftover(*args: Any, **kwargs: Any) -> PreTrainedModel:
        model = load_skeleton(*args, **kwargs)
        model.model.mask = torch.ones(2, device="meta")
        return model

    shard.load_skeleton = with_leftover
    return refusal_of(world, [folder, folder])


def test_a_tensor_that_no_broadcast_reaches_ends_all_ranks(saved: SavedModel):
    one, other = run_world(2, refusal_of_a_leftover, saved("qwen3_moe"))
    assert one == other
    assert "1 tensor(s) got no value on this rank: model.mask" in one
