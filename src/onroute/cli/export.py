"""`onroute export`: a checkpoint as a folder that every Hugging Face program loads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")],
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint; without it the newest one.", metavar="STEP")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder; without it RUN/export/step-….", metavar="FOLDER")
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(help="float32 keeps the trainer's weights bit for bit.", metavar="float32|bfloat16"),
    ] = Dtype.FLOAT32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Export a run's model to a Hugging Face folder.

    Example: onroute export runs/demo --dtype bfloat16
    """
    from onroute.cli.catalogs import CATALOGS
    from onroute.core.config.load import load_config
    from onroute.orchestration.folder import RunFolder

    folder = RunFolder.open(run)
    config = load_config(folder.config, (), CATALOGS)

    from onroute.cli.output import print_json
    from onroute.models.shard import COMPUTE_DTYPES
    from onroute.orchestration.export import export_run

    exported = export_run(config, folder, step=step, out=out, dtype=COMPUTE_DTYPES[dtype])
    if as_json:
        print_json(exported)
    else:
        print(
            f"step {exported.step}: {exported.parameters:,} parameters in {exported.dtype}, "
            f"{exported.tensors:,} tensors, in {exported.folder}"
        )
