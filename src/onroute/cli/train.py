"""`onroute train`: run what a run file says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onroute.cli.failures import tracebacks_in


def train(
    run_file: Annotated[Path, typer.Argument(help="The TOML file of the run.", metavar="RUN.TOML")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Override a key of the file, e.g. --optimizer.lr=1e-6.", metavar="--SECTION.KEY=VALUE"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object with the results as the last line.")
    ] = False,
) -> None:
    """Train a model. `onroute config --toml` prints a run file to fill in.

    Example: onroute train run.toml --optimizer.lr=1e-6 --run.folder=runs/a
    """
    from onroute.cli.catalogs import CATALOGS
    from onroute.core.config.load import load_config

    config = load_config(run_file, overrides or (), CATALOGS)
    with tracebacks_in(Path(config.run.folder)):
        from rich.console import Console

        from onroute.cli.output import print_json
        from onroute.cli.summary import print_accuracy, print_places
        from onroute.observability.progress import Progress
        from onroute.orchestration.run import execute

        summary = execute(config, progress=Progress.open(Console(stderr=True)))
        if as_json:
            print_json(summary)
        else:
            print_accuracy(summary)
            print_places(summary)
            print(f"metrics     {config.run.folder}/metrics.jsonl; the last step's are in summary.json")
