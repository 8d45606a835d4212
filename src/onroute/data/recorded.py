"""Rollouts of past steps on disk, to be trained on or compared again.

One folder a step, `step-000012/rollouts.safetensors`; what else belongs to the step may lie beside
it and goes when the step goes. A file is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from onroute.core.errors import CheckError, OnrouteError, UserError
from onroute.core.files import replacing
from onroute.core.samples import Group
from onroute.data.rollout_arrays import decode, encode
from onroute.data.validate import check_group

FORMAT, SCHEMA = "onroute-rollouts", "1"
FILE_NAME = "rollouts.safetensors"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def save_rollouts(folder: Path, step: int, groups: Sequence[Group]) -> Path:
    """Write the groups of one step and return the folder of that step; an older file is replaced.

    Raises MachineError when they can't be written.
    """
    target = step_folder(folder, step)
    target.mkdir(parents=True, exist_ok=True)
    arrays, records = encode(groups)
    metadata = {"format": FORMAT, "schema": SCHEMA, "records": records, "digest": _digest(arrays, records)}
    with replacing(target / FILE_NAME) as writing:
        save_file(arrays, writing, metadata=metadata)
    return target


def load_rollouts(folder: Path) -> list[Group]:
    """The groups in the folder of one step (see `step_folder`), bit for bit as they were saved.

    Raises:
        UserError: there is no such file, or it has another schema.
        CheckError: it is cut off, was changed, is something else, or holds samples that break a
            promise of theirs.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise UserError("data-no-rollouts", "no recorded rollouts", f"file {path}", "name a recorded step")
    arrays, metadata = _read(path)
    if metadata.get("format") != FORMAT:
        raise _damaged(path, f"it is no {FORMAT} file")
    if metadata.get("schema") != SCHEMA:
        raise UserError(
            "data-rollouts-schema",
            f"rollouts have schema {metadata.get('schema')}, this version reads {SCHEMA}",
            f"file {path}",
            "read them with the version that wrote them",
        )
    records = metadata.get("records", "")
    if metadata.get("digest") != _digest(arrays, records):
        raise _damaged(path, "its digest does not fit its content")
    try:
        groups = decode(arrays, records)
        for group in groups:
            check_group(group)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    except OnrouteError as error:
        raise _damaged(path, f"{error.what} ({error.where})") from error
    return groups


def recorded_steps(folder: Path) -> list[int]:
    """Steps with recorded rollouts, ascending; none when the folder does not exist."""
    steps = []
    for path in folder.glob(f"step-*/{FILE_NAME}"):
        number = path.parent.name.removeprefix("step-")
        if number.isdecimal() and path.parent == step_folder(folder, int(number)):
            steps.append(int(number))
    return sorted(steps)


def prune(folder: Path, keep: int) -> None:
    """Remove all recorded steps but the last `keep`, with everything in their folders."""
    steps = recorded_steps(folder)
    for step in steps[: max(0, len(steps) - keep)]:
        old = step_folder(folder, step)
        # First the file that makes it count: a removal cut short leaves no half of a step behind.
        (old / FILE_NAME).unlink()
        shutil.rmtree(old)


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], Mapping[str, str]]:
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError) as error:
        raise _damaged(path, " ".join(str(error).split())) from error


def _digest(arrays: Mapping[str, NDArray[Any]], records: str) -> str:
    digest = hashlib.blake2b(records.encode(), digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _damaged(path: Path, what: str) -> CheckError:
    fix = "remove it, or record the step again"
    return CheckError("data-rollouts", f"recorded rollouts cannot be used: {what}", f"file {path}", fix)
