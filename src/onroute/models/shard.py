"""A stock model under FSDP2: which modules are gathered together, and weights onto every rank.

Rank 0 alone opens the weight files; the others build the same modules on the meta device and get
their shards, and all buffers, by broadcast.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from onroute.core.config.sections import ModelConfig
from onroute.core.errors import UserError
from onroute.models.load import load_plain, load_skeleton
from onroute.models.world import World
from onroute.routing.discovery import decoder_stack

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """Parameters that are gathered and freed together."""

    name: str
    modules: tuple[nn.Module, ...]
    float32: bool = False
    """Computes in float32, whatever the others compute in."""


def shard_units(model: PreTrainedModel, float32: Collection[str] = ()) -> tuple[ShardUnit, ...]:
    """One unit per decoder layer, the embeddings and the head on their own when they are not tied,
    and what is left with the root, last. Tied embeddings stay in one unit: the root's. Before them,
    as they lie inside, a unit per module that owns one of the parameters named in `float32`.

    Raises UserError when no decoder layers are found.
    """
    owners = dict.fromkeys(name.rpartition(".")[0] for name in float32)
    units = [ShardUnit(name, (model.get_submodule(name),), float32=True) for name in owners]
    layers = decoder_stack(model)
    units += [ShardUnit(f"layers.{index}", (layer,)) for index, layer in enumerate(layers)]
    embeddings = model.get_input_embeddings()
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None and head.weight is not embeddings.weight:
        units += [ShardUnit("embeddings", (embeddings,)), ShardUnit("head", (head,))]
    return (*units, ShardUnit("root", (model,)))


def load_sharded(path: Path, config: ModelConfig, world: World, *, reshard: bool) -> PreTrainedModel:
    """The model in `path` with float32 parameters sharded over `world`, computing in `config.dtype`.

    Every parameter and buffer is the same on every rank as in the files. A collective.
    Raises UserError on all ranks when the model can't be read on any.
    """
    kernels = {"attention": config.attention, "experts": config.experts}
    dtype = COMPUTE_DTYPES[config.dtype]

    def build() -> tuple[PreTrainedModel, list[str]]:
        build_one = load_plain if world.rank == 0 else load_skeleton
        kept = [] if dtype == torch.float32 else _kept_in_float32(path, dtype, **kernels)
        return build_one(path, dtype=torch.float32, **kernels), kept

    model, kept = world.together("loading the model", build)
    weights = dict(model.state_dict()) if world.rank == 0 else {}
    buffers = dict(model.named_buffers()) if world.rank == 0 else {}
    for unit in shard_units(model, kept):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.float32 if unit.float32 else dtype, reduce_dtype=torch.float32
        )
        target = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
        fully_shard(target, mesh=world.mesh, mp_policy=policy, reshard_after_forward=reshard)
    if world.rank == 0:
        model.to(world.device)  # type: ignore[arg-type]
    else:
        model.to_empty(device=world.device)
        model.tie_weights()
    if world.size > 1:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=options)
        _broadcast_buffers(model, buffers, world)
    world.together("checking the model", lambda: _refuse_leftovers(model))
    return model


def _kept_in_float32(path: Path, dtype: torch.dtype, *, attention: str, experts: str) -> list[str]:
    """What the family keeps in float32 in a model of `dtype`, and an engine with it: routers, in some."""
    model = load_skeleton(path, dtype=dtype, attention=attention, experts=experts)
    return [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32]


def _broadcast_buffers(model: PreTrainedModel, buffers: dict[str, torch.Tensor], world: World) -> None:
    """Every buffer from rank 0, persistent or not, in rank 0's order and data types."""
    told: list[list[tuple[str, torch.dtype, torch.Size]]] = [
        [(name, buffer.dtype, buffer.shape) for name, buffer in buffers.items()]
    ]
    dist.broadcast_object_list(told, src=0, group=world.mesh.get_group())
    for name, dtype, shape in told[0]:
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        value = torch.empty(shape, dtype=dtype, device=world.device)
        if world.rank == 0:
            value.copy_(module._buffers[leaf])  # type: ignore[arg-type]
        dist.broadcast(value, src=0, group=world.mesh.get_group())
        module._buffers[leaf] = value


def _refuse_leftovers(model: PreTrainedModel) -> None:
    states = [*model.named_parameters(), *model.named_buffers()]
    plain = [
        (f"{name}.{key}", value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    left = sorted(name for name, tensor in (*states, *plain) if tensor.is_meta)
    if left:
        raise UserError(
            "model-meta",
            f"{len(left)} tensor(s) got no value on this rank: {', '.join(left[:10])}",
            type(model).__name__,
            "train this model on one rank",
        )
