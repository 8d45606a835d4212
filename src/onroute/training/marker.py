"""The marker of a complete checkpoint: which files it has, each with its digest, and the facts beside
the tensors. Reads files only; imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onroute.core.errors import UserError
from onroute.core.samples import Json

SCHEMA = 2
MARKER = "complete.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMark:
    """size: bytes. digest: blake2b of the content, hexadecimal."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """ranks: how many wrote it. files: all but the marker itself, by name. facts: plain values."""

    ranks: int
    files: Mapping[str, FileMark]
    facts: Mapping[str, Json]


def measure(path: Path) -> FileMark:
    """Size and digest of a file, read in chunks."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
        return FileMark(size=file.tell(), digest=digest.hexdigest())


def write_marker(folder: Path, marker: Marker) -> None:
    """Say durably that `folder` is complete."""
    with (folder / MARKER).open("w", encoding="utf-8") as file:
        file.write(_text({"schema": SCHEMA, **asdict(marker)}))
        file.flush()
        os.fsync(file.fileno())


def read_marker(folder: Path) -> Marker:
    """The marker in `folder`, after a look at the presence and size of every file it lists.

    Raises UserError when there is none, it was changed, a file is missing or has another size, or the
    schema is not this release's.
    """
    path = folder / MARKER
    try:
        text = path.read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads(text)
        schema = int(content["schema"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"no complete checkpoint: {MARKER} is missing or broken") from error
    if schema != SCHEMA:
        raise UserError(
            "checkpoint-schema",
            f"checkpoint schema {schema}, this release reads {SCHEMA}",
            str(folder),
            "load it with the release that wrote it, or start again",
        )
    content.pop("digest", None)
    if _text(content) != text:
        raise damaged(folder, f"{MARKER} was changed: its digest does not fit its content")
    files = {name: FileMark(**mark) for name, mark in content["files"].items()}
    for name, mark in files.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != mark.size:
            state = "is missing" if size is None else f"is {size} bytes long and was saved with {mark.size}"
            raise damaged(folder, f"{name} {state}")
    return Marker(ranks=content["ranks"], files=files, facts=content["facts"])


def verify(folder: Path, marker: Marker, names: Iterable[str]) -> None:
    """Raises UserError when the content of one of these files is not what was saved."""
    for name in names:
        try:
            found = measure(folder / name)
        except OSError as error:
            raise damaged(folder, f"{name} can't be read: {error.strerror}") from error
        if found != marker.files[name]:
            raise damaged(folder, f"{name} was changed: its digest does not fit its content")


def damaged(folder: Path, what: str) -> UserError:
    return UserError("checkpoint-damaged", what, str(folder), "choose another checkpoint, or start again")


def _text(content: Mapping[str, Any]) -> str:
    """One form for one content, so that every changed byte shows."""
    body = json.dumps(content, indent=1, sort_keys=True)
    digest = hashlib.blake2b(body.encode(), digest_size=32).hexdigest()
    return json.dumps({**content, "digest": digest}, indent=1, sort_keys=True) + "\n"
