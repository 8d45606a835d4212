"""A file system of a few MiB in memory, to be filled up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096


@dataclass(frozen=True)
class Disk:
    """A file system of its own in memory."""

    path: Path

    def leave(self, size: int) -> None:
        """Make room for `size` more bytes and no page more."""
        counts = os.statvfs(self.path)
        used = (counts.f_blocks - counts.f_bfree) * counts.f_frsize
        options = f"remount,size={used + size}"
        subprocess.run(["mount", "-o", options, str(self.path)], check=True, capture_output=True)


class CannotMount(Exception):
    """This machine, or this user, can't mount one."""


@contextmanager
def mounted(place: Path) -> Iterator[Disk]:
    """A disk of 64 MiB at `place`, gone at the end."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotMount(done.stderr.strip())
    try:
        yield Disk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
