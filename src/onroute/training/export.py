"""The trainer's weights as an ordinary Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from onroute.training.trainer import Trainer

_SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configuration, generation settings and tokenizer of the model the run began with."""


def export_model(trainer: Trainer, origin: Path, folder: Path) -> None:
    """Write the current weights, in the trainer's float32, with the side files of `origin`. A collective:
    every rank gathers, rank 0 writes.

    Whole or not at all: written beside `folder`, then renamed.
    """
    tensors: dict[str, Tensor] = {}
    for unit in trainer.weights():
        if trainer.world.rank == 0:
            tensors |= {name: tensor.cpu().contiguous().clone() for name, tensor in unit.items()}
    trainer.world.together(
        "exporting the model", lambda: _write(tensors, origin, folder) if tensors else None
    )


def _write(tensors: dict[str, Tensor], origin: Path, folder: Path) -> None:
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for pattern in _SIDE_FILES:
        for path in origin.glob(pattern):
            if not path.name.endswith(".safetensors.index.json"):
                shutil.copy(path, temporary)
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
