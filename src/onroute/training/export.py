"""A model's weights as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from onroute.core.files import naming, sync
from onroute.models.load import load_skeleton
from onroute.models.names import PublishedLayout
from onroute.models.world import World
from onroute.training.folders import begin, beside, discard, publish
from onroute.training.trainer import Trainer

_SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configuration, generation settings and tokenizer of the model the run began with."""
SHARD_BYTES = 5 << 30
"""Most bytes of one weight file, but for a larger parameter; rank 0 holds as much at a time."""
_EXPORTING = "exporting the model"


def export_model(trainer: Trainer, origin: Path, folder: Path) -> None:
    """Write the current weights, in the trainer's float32, with the side files of `origin`. A collective:
    every rank gathers, rank 0 writes. Replaces a folder that is there."""
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in trainer.published.specs}
    write_model(trainer.weights(), origin, folder, trainer.world, dtype=torch.float32, dtypes=dtypes)


def write_model(
    units: Iterable[Mapping[str, Tensor]],
    origin: Path,
    folder: Path,
    world: World,
    *,
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write published tensors, unit by unit, with the side files of `origin`. A collective.

    dtype: what config.json says. dtypes: of each published tensor, see `published_dtypes`.
    Whole or not at all: written beside `folder`, then renamed. Raises MachineError when it can't be.
    """
    first = world.rank == 0
    files: list[dict[str, int]] = []
    try:
        _on_first_rank(world, folder, partial(_begin, origin, folder, dtype))
        for shard in _shards(units, dtypes, shard_bytes, keep=first):
            path = beside(folder, "writing") / f"{len(files)}.safetensors"
            files.append({name: tensor.numel() * tensor.element_size() for name, tensor in shard.items()})
            _on_first_rank(world, folder, partial(_save, shard, path))
        _on_first_rank(world, folder, partial(_complete, folder, files))
    except BaseException:
        if first:
            discard(folder)
        raise


def _shards(
    units: Iterable[Mapping[str, Tensor]], dtypes: Mapping[str, torch.dtype], limit: int, *, keep: bool
) -> Iterator[dict[str, Tensor]]:
    """Whole units in files of up to `limit` bytes, cut alike on every rank; empty where not kept."""
    shard: dict[str, Tensor] = {}
    filled = 0
    for unit in units:
        size = sum(tensor.numel() * dtypes[name].itemsize for name, tensor in unit.items())
        if filled and filled + size > limit:
            yield shard
            shard, filled = {}, 0
        filled += size
        if keep:
            shard |= {name: t.to("cpu", dtypes[name], copy=True).contiguous() for name, t in unit.items()}
    yield shard


def published_dtypes(origin: Path, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each published tensor in a model of `dtype`, as the stock loader would make it:
    families keep some, e.g. their routers' biases, in float32 always."""
    skeleton = load_skeleton(origin, dtype=dtype, attention="eager", experts="eager")
    return {spec.name: getattr(torch, spec.dtype) for spec in PublishedLayout(skeleton).specs}


def _on_first_rank(world: World, folder: Path, action: Callable[[], None]) -> None:
    def run() -> None:
        if world.rank == 0:
            with naming(folder):
                action()

    world.together(_EXPORTING, run)


def _begin(origin: Path, folder: Path, dtype: torch.dtype) -> None:
    writing = begin(folder)
    for pattern in _SIDE_FILES:
        for path in origin.glob(pattern):
            if not path.name.endswith(".safetensors.index.json"):
                shutil.copy(path, writing)
    config = writing / "config.json"
    name = str(dtype).removeprefix("torch.")
    told = _with_dtype(json.loads(config.read_text(encoding="utf-8")), name) | {"dtype": name}
    config.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """`config` saying `dtype` wherever it says one, parts of a model that also sees included."""
    names = {"dtype", "torch_dtype"}
    changed = {name: _with_dtype(v, dtype) if isinstance(v, dict) else v for name, v in config.items()}
    return {name: dtype if name in names else value for name, value in changed.items()}


def _save(shard: dict[str, Tensor], path: Path) -> None:
    save_file(shard, path, metadata={"format": "pt"})
    sync(path)


def _complete(folder: Path, files: list[dict[str, int]]) -> None:
    """Give the weight files the names that the stock loader looks for, with an index when they are many."""
    writing = beside(folder, "writing")
    if len(files) == 1:
        (writing / "0.safetensors").rename(writing / "model.safetensors")
    else:
        places: dict[str, str] = {}
        for number, names in enumerate(files):
            name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            (writing / f"{number}.safetensors").rename(writing / name)
            places |= dict.fromkeys(names, name)
        total = sum(size for sizes in files for size in sizes.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (writing / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    publish(folder)
