"""Folders that are there whole or not at all, whenever the process is killed.

A new folder is written as `.NAME.writing` and renamed. One that it replaces steps aside as
`.NAME.replaced` first; one that is no longer wanted becomes `.NAME.removing` before its files go.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Literal

from onroute.core.files import sync

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<state>writing|replaced|removing)")


def begin(folder: Path) -> Path:
    """An empty folder beside `folder` to write to, until `publish` gives it its name."""
    writing = beside(folder, "writing")
    if writing.exists():
        shutil.rmtree(writing)
    writing.mkdir(parents=True)
    return writing


def publish(folder: Path) -> None:
    """Give what `begin` began its name. What had that name before stands aside until then, so that one of
    the two is there at every moment."""
    writing, aside = beside(folder, "writing"), beside(folder, "replaced")
    sync(writing)
    if folder.exists():
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
    writing.rename(folder)
    sync(folder.parent)
    if aside.exists():
        shutil.rmtree(aside)


def discard(folder: Path) -> None:
    """Give up what `begin` began; does nothing when there is none, and never raises."""
    shutil.rmtree(beside(folder, "writing"), ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a folder; cut short, it leaves nothing that looks like one that is damaged."""
    removing = beside(folder, "removing")
    if removing.exists():
        shutil.rmtree(removing)
    folder.rename(removing)
    shutil.rmtree(removing)


def tidy(parent: Path) -> None:
    """Bring to their end the replacements and removals in `parent` that were cut short, and drop what
    was half-written. `parent` must hold folders of this kind alone."""
    if not parent.is_dir():
        return
    for path in sorted(parent.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None:
            continue
        folder = parent / match["name"]
        if match["state"] == "replaced" and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path)


def replaced_name(path: Path) -> str | None:
    """The name of the folder that `path` stood aside for; None when it is something else."""
    match = _LEFTOVER.fullmatch(path.name)
    return match["name"] if match is not None and match["state"] == "replaced" else None


def beside(folder: Path, state: Literal["writing", "replaced", "removing"]) -> Path:
    """Where `folder` is while it is in this state."""
    return folder.with_name(f".{folder.name}.{state}")
