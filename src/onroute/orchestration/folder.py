"""The folder of a run: where everything lies, and who may write there."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onroute.core.errors import UserError
from onroute.core.files import disk_full, is_disk_full, replacing

_STEP = re.compile(r"step-(\d{6,})")
SAMPLED_BY = "weights"
"""In the folder of a recorded step: the Hugging Face folder of the weights that sampled it."""


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step that a folder's name says; None for the name of something else."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def numbered(folder: Path) -> dict[int, Path]:
    """The folders of steps in `folder`, by step, ascending."""
    if not folder.is_dir():
        return {}
    found = {step: path for path in folder.iterdir() if (step := step_of(path.name)) is not None}
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`config.toml`, `metrics.jsonl`, `evaluations.json`, `summary.json`, `checkpoints/step-…/`,
    `rollouts/step-…/` each with the weights that sampled it, `plots/`, `trace*.json`, and the files of
    the trackers."""

    path: Path

    def require_free(self) -> None:
        """Raises UserError when the folder holds something: no run writes over another."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(
                "run-folder",
                "the run folder exists already",
                str(self.path),
                'choose another run.folder, or go on with it by run.resume = "auto"',
            )

    def create(self) -> None:
        """Make the folder if it is not there. Raises UserError when that is not possible, MachineError when
        the disk is full."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(self.path) from error
            raise UserError(
                "run-folder",
                f"the run folder can't be made ({error.strerror})",
                str(self.path),
                "choose another run.folder",
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Ours alone for the body; the lock goes with the process, however it ends.

        Raises UserError when another process runs in this folder."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(
                    "run-busy",
                    "another process runs in this folder",
                    str(self.path),
                    "wait for its end, or choose another run.folder",
                ) from error
            yield

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that was made before. Raises UserError when `path` is none."""
        folder = cls(path)
        if not folder.config.is_file():
            what = "no run folder" if path.exists() else "run folder does not exist"
            raise UserError("run-folder", what, f"{path} has no config.toml", "give the folder of a run")
        return folder

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def save_request(self) -> Path:
        return self.path / "save"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.json"

    def trace(self, first_step: int) -> Path:
        """The spans of one session: of the run's first, or of one that went on after `first_step`."""
        return self.path / (f"trace-{first_step:06d}.json" if first_step else "trace.json")

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def write(self, path: Path, text: str) -> None:
        """A text file of the run, whole or not at all. Raises MachineError naming it when it can't be."""
        with replacing(path) as writing:
            writing.write_text(text, encoding="utf-8")
