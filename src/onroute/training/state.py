"""A trainer's checkpoint: model, optimizer and random state, written whole or not at all.

Written to a temporary folder, synced, marked complete, then renamed. Every rank writes and reads its
own shards, so a checkpoint loads on another number of ranks. A checkpoint is untrusted input: its
index may name the plain classes of torch's own format and nothing else.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from onroute.core.errors import MachineError, UserError
from onroute.core.samples import Json
from onroute.models.world import World

SCHEMA = 1
_MARKER = "complete.json"


def save_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, facts: dict[str, Json]
) -> None:
    """Write a checkpoint to `folder`, replacing one that is there. `facts` are plain values kept
    beside the tensors. A collective.

    Raises MachineError on all ranks when it can't be written; a checkpoint that was there is untouched.
    """
    temporary = folder.with_name(f".{folder.name}.writing")
    world.together("saving a checkpoint", lambda: _prepare(temporary, world))
    optimizer.zero_grad(set_to_none=True)
    state = _state(model, optimizer)
    state[f"rng/{world.rank}"] = torch.get_rng_state()
    try:
        save(state, storage_writer=FileSystemWriter(temporary, sync_files=True))
    except CheckpointException as error:  # torch raises it on all ranks
        raise MachineError(
            "checkpoint-write",
            f"the checkpoint can't be written: {_first_cause(error)}",
            str(temporary),
            "see that the disk has room; the checkpoint before it is still whole",
        ) from error
    world.together("saving a checkpoint", lambda: _publish(temporary, folder, world, facts))


def load_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> dict[str, Json]:
    """Restore what `save_state` wrote into `model` and `optimizer`; the facts kept with it. A collective.

    Raises UserError on all ranks, with nothing changed, when the checkpoint is missing, incomplete,
    of another schema or of another model.
    """
    marker = world.together("loading a checkpoint", lambda: read_marker(folder))
    reader = _PlainReader(folder)
    optimizer.zero_grad(set_to_none=True)
    state = _state(model, optimizer)
    saved_ranks = int(marker["ranks"])
    own_rng = f"rng/{world.rank}"
    if world.rank < saved_ranks:
        state[own_rng] = torch.get_rng_state()
    world.together(
        "loading a checkpoint", lambda: _require_same_tensors(reader.read_metadata(), state, folder)
    )
    try:
        load(state, storage_reader=reader)
    except CheckpointException as error:
        raise _unusable(folder, f"its tensors can't be read: {_first_cause(error)}") from error
    _, optimizer_state = get_state_dict(model, optimizer)
    optimizer_state["state"] = state["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)
    rng = state.get(own_rng)
    if isinstance(rng, Tensor):
        torch.set_rng_state(rng)
    facts: dict[str, Json] = marker["facts"]
    return facts


def read_marker(folder: Path) -> dict[str, Any]:
    """The marker of a complete checkpoint. Raises UserError when there is none, a file it lists is
    missing or has another size, or the schema is not this one's."""
    path = folder / _MARKER
    try:
        marker = json.loads(path.read_text())
        files = {str(name): int(size) for name, size in marker["files"].items()}
        schema, _, _ = int(marker["schema"]), int(marker["ranks"]), marker["facts"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(folder, f"no complete checkpoint ({_MARKER} is missing or broken)") from error
    if schema != SCHEMA:
        raise _unusable(folder, f"checkpoint schema {schema}, this release reads {SCHEMA}")
    for name, size in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise _unusable(folder, f"{name} is missing or not {size} bytes long")
    result: dict[str, Any] = marker
    return result


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # The parameter groups hold settings of the run file, not state; leaving them out leaves tensors only.
    _fill_moments(optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state["state"]}


def _fill_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter that has not been stepped yet the state AdamW would begin with.

    Without it a load into a fresh optimizer would drop the saved moments. torch fills it by a step of
    its own, which counts and so changes the bias correction of the first real one.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] |= {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _prepare(temporary: Path, world: World) -> None:
    if world.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)


def _publish(temporary: Path, folder: Path, world: World, facts: dict[str, Json]) -> None:
    if world.rank != 0:
        return
    files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    marker = {"schema": SCHEMA, "ranks": world.size, "files": files, "facts": facts}
    with (temporary / _MARKER).open("w") as file:
        json.dump(marker, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_same_tensors(metadata: Metadata, state: dict[str, Any], folder: Path) -> None:
    flat, _ = flatten_state_dict(state)
    saved = {key for key in metadata.state_dict_metadata if not key.startswith("rng/")}
    wanted = {key for key in flat if not key.startswith("rng/")}
    if saved != wanted:
        missing, extra = sorted(wanted - saved)[:5], sorted(saved - wanted)[:5]
        raise _unusable(folder, f"checkpoint of another model (missing {missing}, extra {extra})")
    for key, tensor in flat.items():
        size = getattr(metadata.state_dict_metadata.get(key), "size", None)
        if size != tensor.shape:
            sizes = f"{key} is {list(size or ())}, here {list(tensor.shape)}"
            raise _unusable(folder, f"checkpoint of another model ({sizes})")


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    words = str(cause).splitlines() or [""]
    return f"{type(cause).__name__}: {words[0]} (rank {rank})"


def _unusable(folder: Path, what: str) -> UserError:
    return UserError("checkpoint", what, str(folder), "choose another checkpoint of the run, or start again")


class _PlainReader(FileSystemReader):
    """Reads torch's checkpoint index without letting it name code to run."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _PlainUnpickler(file).load()
        except (
            pickle.UnpicklingError,
            EOFError,
            AttributeError,
            ImportError,
            IndexError,
            ValueError,
            OSError,
        ) as error:
            raise _unusable(path.parent, f"the index .metadata is broken ({error})") from error
        if not isinstance(metadata, Metadata):
            raise _unusable(path.parent, "the index .metadata holds something else")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _PlainUnpickler(pickle.Unpickler):
    """Knows the names that an index of plain tensors is made of; anything else is refused."""

    _NAMES: Mapping[str, frozenset[str]] = {
        "torch.distributed.checkpoint.metadata": frozenset(
            {
                "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
                "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
            }
        ),
        "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
        "torch.serialization": frozenset({"_get_layout"}),
        "torch": frozenset({"Size", "float32", "float16", "bfloat16", "float64", "uint8", "int64", "bool"}),
        "pathlib": frozenset({"Path", "PosixPath"}),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if name in self._NAMES.get(module, frozenset()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
