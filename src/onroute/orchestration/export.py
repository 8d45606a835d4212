"""A checkpoint of a run as an ordinary Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from onroute.core.config.sections import RunConfig
from onroute.core.errors import UserError
from onroute.models.load import load_plain
from onroute.models.names import PublishedLayout
from onroute.models.world import open_world
from onroute.orchestration.checkpoints import saved_steps
from onroute.orchestration.folder import RunFolder, step_path
from onroute.training.export import published_dtypes, write_model
from onroute.training.marker import read_marker
from onroute.training.state import load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written where; `dtype` is the one in config.json."""

    folder: Path
    step: int
    dtype: str
    tensors: int
    parameters: int


def export_run(
    config: RunConfig, folder: RunFolder, *, step: int | None, out: Path | None, dtype: torch.dtype
) -> Exported:
    """Write the weights of a checkpoint, the newest when `step` is None, to `out` or `export/step-…` in
    the run folder. Needs memory for one float32 copy of the model and one weight file.

    config: the run's own resolved config; its `model.path` gives tokenizer and settings.

    Raises UserError when there is no such checkpoint, it can't be used, or `out` exists.
    """
    saved = saved_steps(folder.checkpoints)
    chosen = max(saved, default=None) if step is None else step
    if chosen is None or chosen not in saved:
        what = "no checkpoint" if chosen is None else f"no checkpoint of step {chosen}"
        raise UserError(
            "export-step",
            f"there is {what}; there are: {', '.join(map(str, saved)) or 'none'}",
            str(folder.checkpoints),
            "give --step one of them, or train first",
        )
    target = out if out is not None else step_path(folder.path / "export", chosen)
    if target.exists():
        raise UserError(
            "export-folder", "the folder exists already", str(target), "give another by --out, or remove it"
        )
    read_marker(saved[chosen])
    origin = Path(config.model.path)
    with open_world(timeout_s=config.parallel.timeout_s, threads=config.run.threads) as world:
        model = load_plain(origin, dtype=torch.float32, attention="eager", experts="eager")
        load_weights(saved[chosen], model, world)
        layout = PublishedLayout(model)
        dtypes = published_dtypes(origin, dtype)
        write_model(layout.tensors(), origin, target, world, dtype=dtype, dtypes=dtypes)
    return Exported(
        folder=target,
        step=chosen,
        dtype=str(dtype).removeprefix("torch."),
        tensors=len(layout.specs),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
