"""A trainer's checkpoint: model, optimizer and random state, written whole or not at all.

Every rank writes and reads its own shards, so a checkpoint loads on another number of ranks. All files
are compared with the digests in the marker before anything changes. A checkpoint is untrusted input: its
index may name the plain classes of torch's own format and nothing else.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from onroute.core.errors import MachineError, UserError
from onroute.core.samples import Json
from onroute.models.world import World
from onroute.training.folders import begin, beside, discard, publish, tidy
from onroute.training.marker import FileMark, Marker, damaged, measure, read_marker, verify, write_marker

_INDEX = ".metadata"
_SAVING, _LOADING = "saving a checkpoint", "loading a checkpoint"


def save_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, facts: dict[str, Json]
) -> None:
    """Write a checkpoint to `folder`, replacing one that is there. `facts` are plain values kept
    beside the tensors. `folder.parent` holds checkpoints alone: what a killed save left there goes.
    A collective.

    Raises MachineError on all ranks when it can't be written; a checkpoint that was there is untouched.
    """
    optimizer.zero_grad(set_to_none=True)
    state = _state(model, optimizer) | _random_state(world)
    try:
        writing = beside(folder, "writing")
        _on_first_rank(world, folder, lambda: _begin(folder))
        _write_tensors(writing, state)
        own = world.together(_SAVING, lambda: _measure_own(writing, world.rank))
        files = {name: mark for marks in world.gather(own) for name, mark in marks.items()}
        marker = Marker(ranks=world.size, files=files, facts=facts)
        _on_first_rank(world, folder, lambda: _complete(folder, marker))
    except MachineError:
        if world.rank == 0:
            discard(folder)  # the run's last words need the room on a full disk
        raise


def load_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> dict[str, Json]:
    """Restore what `save_state` wrote into `model` and `optimizer`; the facts kept with it. A collective.

    Raises UserError on all ranks, with nothing changed, when the checkpoint is missing, incomplete,
    damaged, of another schema or of another model.
    """
    marker = _verified(folder, world)
    optimizer.zero_grad(set_to_none=True)
    state = _state(model, optimizer)
    random = _random_state(world) if world.rank < marker.ranks else {}
    _read_tensors(folder, state, random, world)
    _, optimizer_state = get_state_dict(model, optimizer)
    optimizer_state["state"] = state["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)
    _restore_random_state(random, world)
    return dict(marker.facts)


def load_weights(folder: Path, model: nn.Module, world: World) -> dict[str, Json]:
    """Restore the model alone, into float32 parameters; the facts. Raises like `load_state`."""
    marker = _verified(folder, world)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    _read_tensors(folder, state, {}, world)
    set_model_state_dict(model, state["model"])
    return dict(marker.facts)


def _verified(folder: Path, world: World) -> Marker:
    """The marker, when all files are what it says. The ranks share the reading of the big ones."""

    def check() -> Marker:
        marker = read_marker(folder)
        data = sorted(marker.files.keys() - {_INDEX})
        verify(folder, marker, [*(marker.files.keys() & {_INDEX}), *data[world.rank :: world.size]])
        return marker

    return world.together(_LOADING, check)


def _write_tensors(writing: Path, state: dict[str, Any]) -> None:
    try:
        save(state, storage_writer=FileSystemWriter(writing, sync_files=True))
    except CheckpointException as error:  # torch raises it on all ranks
        raise _unwritable(writing, _first_cause(error)) from error


def _read_tensors(folder: Path, state: dict[str, Any], random: dict[str, Tensor], world: World) -> None:
    """Fill the tensors in `state` and `random`, in place; `random` loses what was not saved."""
    reader = _PlainReader(folder)

    def check() -> None:
        metadata = reader.read_metadata()
        _require_same_tensors(metadata, state, folder)
        for name in [name for name in random if name not in metadata.state_dict_metadata]:
            del random[name]

    world.together(_LOADING, check)
    try:
        load(state | random, storage_reader=reader)
    except CheckpointException as error:
        raise damaged(folder, f"its tensors can't be read: {_first_cause(error)}") from error


def _random_state(world: World) -> dict[str, Tensor]:
    """The generators of this rank: the CPU's, and its GPU's where it has one."""
    state = {f"rng/{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        state[f"rng/{world.rank}/cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def _restore_random_state(state: Mapping[str, Tensor], world: World) -> None:
    for name, value in state.items():
        if name.endswith("/cuda"):
            torch.cuda.set_rng_state(value, world.device)
        else:
            torch.set_rng_state(value)


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


def _on_first_rank(world: World, folder: Path, action: Callable[[], object]) -> None:
    def run() -> None:
        if world.rank == 0:
            with _machine_errors(folder):
                action()

    world.together(_SAVING, run)


def _begin(folder: Path) -> None:
    tidy(folder.parent)
    begin(folder)


def _complete(folder: Path, marker: Marker) -> None:
    write_marker(beside(folder, "writing"), marker)
    publish(folder)


def _measure_own(writing: Path, rank: int) -> dict[str, FileMark]:
    """What this rank wrote; the index is the first rank's."""
    with _machine_errors(writing):
        paths = sorted(writing.glob(f"__{rank}_*"))
        return {path.name: measure(path) for path in ([writing / _INDEX, *paths] if rank == 0 else paths)}


@contextmanager
def _machine_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritable(folder, error.strerror or type(error).__name__) from error


def _unwritable(folder: Path, cause: str) -> MachineError:
    # torch's zip writer hides a full disk behind words of its own, so the free space is told with them.
    return MachineError(
        "checkpoint-write",
        f"the checkpoint can't be written: {cause} ({_free_bytes(folder) / (1 << 20):,.1f} MiB free)",
        str(folder),
        "see that the disk has room; the checkpoint before it is still whole",
    )


def _free_bytes(folder: Path) -> int:
    """Of the file system that holds `folder`, which another rank may be removing at this moment."""
    for place in (folder, *folder.parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    raise AssertionError("the root of a file system is always there")


def _require_same_tensors(metadata: Metadata, state: dict[str, Any], folder: Path) -> None:
    flat, _ = flatten_state_dict(state)
    saved = {key for key in metadata.state_dict_metadata if key.partition(".")[0] in state}
    if saved != flat.keys():
        missing, extra = sorted(flat.keys() - saved)[:5], sorted(saved - flat.keys())[:5]
        raise _of_another_model(folder, f"missing {missing}, extra {extra}")
    for key, tensor in flat.items():
        size = getattr(metadata.state_dict_metadata[key], "size", None)
        if size != tensor.shape:
            raise _of_another_model(folder, f"{key} is {list(size or ())}, here {list(tensor.shape)}")


def _of_another_model(folder: Path, difference: str) -> UserError:
    return UserError(
        "checkpoint-model",
        f"checkpoint of another model ({difference})",
        str(folder),
        "set model.path to the model of the run, or start again",
    )


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    words = str(cause).splitlines() or [""]
    return f"{type(cause).__name__}: {words[0]} (rank {rank})"


class _PlainReader(FileSystemReader):
    """Reads torch's checkpoint index without letting it name code to run."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / _INDEX
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
            raise damaged(path.parent, f"the index {_INDEX} is broken ({error})") from error
        if not isinstance(metadata, Metadata):
            raise damaged(path.parent, f"the index {_INDEX} holds something else")
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
