"""Files that are there whole or not at all, and what is told when one can't be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onroute.core.errors import MachineError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to, which takes its name, durably, when the body is done.

    Raises MachineError when it can't be written; what was there before is untouched then.
    """
    writing = path.with_name(f".{path.name}.writing")
    with naming(path):
        try:
            yield writing
            sync(writing)
            writing.replace(path)
            sync(path.parent)
        finally:
            writing.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises MachineError with the name of `path` for what says in the body that it can't be written."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise disk_full(path) from error
        if isinstance(error, OSError):
            what = f"it can't be written: {error.strerror or type(error).__name__}"
            fix = "see that its folder can be written, then resume"
            raise MachineError("machine-write", what, str(path), fix) from error
        raise


def disk_full(path: Path) -> MachineError:
    return MachineError(
        "machine-disk", "no space left on the disk", str(path), "free some space, then resume"
    )


def is_disk_full(error: Exception) -> bool:
    """Whether an error says so, by its number or, as those of some libraries, only in words."""
    told = isinstance(error, OSError) and error.errno in _DISK_FULL
    return told or "No space left on device" in str(error)


def sync(path: Path) -> None:
    """Make a file, or renames inside a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
