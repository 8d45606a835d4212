"""`onroute demo`: a tiny mixture-of-experts model learns by RL on the route it took."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onroute.cli.failures import tracebacks_in

if TYPE_CHECKING:
    from onroute.orchestration.run import RunSummary
    from onroute.training.compare import Comparison


def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Override a key of the packaged run file, e.g. --run.steps=40.",
            metavar="--SECTION.KEY=VALUE",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object with the results as the last line.")
    ] = False,
) -> None:
    """Build a tiny MoE, warm it up, train it with GRPO, and compare.

    Example: onroute demo --run.seed=1
    """
    from onroute.cli.catalogs import CATALOGS
    from onroute.core.config.load import load_config
    from onroute.orchestration.folder import RunFolder

    with as_file(files("onroute.cli") / "quickstart.toml") as run_file:
        config = load_config(run_file, _with_own_folders(overrides or ()), CATALOGS)
    folder, model = RunFolder(Path(config.run.folder)), Path(config.model.path)
    folder.require_free()
    with tracebacks_in(folder.path):
        from rich.console import Console

        from onroute.models.demo import build_demo_model
        from onroute.observability.progress import Progress
        from onroute.orchestration.compare import compare_run
        from onroute.orchestration.run import execute

        progress = Progress.open(Console(stderr=True))
        if not model.exists():
            parameters = build_demo_model(model, seed=config.run.seed)
            progress.note(f"built a Qwen3-MoE of {parameters:,} parameters in {model}")
        summary = execute(config, progress=progress)
        result, picture = compare_run(config, folder)
        if as_json:
            _print_json(summary, result)
        else:
            _print_tables(summary, result, picture)


def _with_own_folders(overrides: Sequence[str]) -> list[str]:
    """The overrides, with a run folder and a model folder that are new unless the user names them."""
    given = dict(text.partition("=")[::2] for text in overrides)
    folder = given.get("--run.folder")
    if folder is None:
        names = chain(["runs/demo"], (f"runs/demo-{number}" for number in count(2)))
        folder = next(n for n in names if not Path(n).exists() and not Path(f"{n}-model").exists())
    model = given.get("--model.path", f"{folder}-model")
    return [*overrides, f"--run.folder={folder}", f"--model.path={model}"]


def _print_json(summary: RunSummary, result: Comparison) -> None:
    from onroute.cli.output import print_json

    accuracy = {name: stage.value for name, stage in summary.accuracy.items()}
    print_json(
        {
            "accuracy": {
                "before": accuracy.get("before"),
                "after_warmup": accuracy.get("after_supervised"),
                "after_rl": accuracy.get("after"),
            },
            "intervals": summary.accuracy,
            "lift": summary.lift,
            "k3": {"native": result.native["k3"], "replay": result.replay["k3"]},
            "k3_factor": result.k3_factor,
            "log_prob_abs_diff": {
                "native": result.native["log_prob_abs_diff"], "replay": result.replay["log_prob_abs_diff"]
            },
            "agreement": sum(result.agreement) / len(result.agreement),
            "seconds": {
                "warmup": summary.seconds.get("supervised", 0.0),
                "rl": summary.seconds["rl"],
                "total": summary.seconds["total"],
            },
            "run": summary.run,
        }
    )  # fmt: skip


def _print_tables(summary: RunSummary, result: Comparison, picture: Path) -> None:
    from onroute.cli.compare import comparison_rows
    from onroute.cli.output import print_table
    from onroute.cli.summary import print_accuracy, print_places

    print_accuracy(summary)
    print_table(
        f"Trainer against engine on the same {len(result.engine_log_probs):,} tokens",
        ("", "native", "replay", "native / replay (95 %)"),
        list(comparison_rows(result))[:2],
    )
    print_places(summary, [picture])
