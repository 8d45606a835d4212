"""`onroute compare`: the same tokens and weights, native against replayed routing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from onroute.algorithms.bootstrap import Interval
    from onroute.training.compare import Comparison

_ROWS = (
    ("k3", "k3, nats per token"),
    ("log_prob_abs_diff", "mean |Δ log-prob|, nats"),
    ("log_prob_abs_diff_max", "max |Δ log-prob|, nats"),
    ("share_above_0.1", "tokens over 0.1 nats, share"),
    ("share_above_1", "tokens over 1 nat, share"),
    ("effective_sample_size", "effective samples, share"),
)


def compare(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object with the results as the last line.")
    ] = False,
) -> None:
    """Compare native with replayed routing on a run's own tokens.

    Example: onroute compare runs/demo
    """
    from onroute.cli.catalogs import CATALOGS
    from onroute.cli.output import print_json, print_table
    from onroute.core.config.load import load_config
    from onroute.orchestration.compare import compare_run
    from onroute.orchestration.folder import RunFolder

    folder = RunFolder.open(run)
    result, picture = compare_run(load_config(folder.config, (), CATALOGS), folder)
    if as_json:
        print_json(
            {
                "steps": result.steps,
                "sequences": result.num_sequences,
                "tokens": len(result.engine_log_probs),
                "native": result.native,
                "replay": result.replay,
                "k3_factor": result.k3_factor,
                "abs_factor": result.abs_factor,
                "layers": result.layers,
                "agreement": result.agreement,
                "picture": picture,
            }
        )
        return
    title = (
        f"{result.num_sequences:,} sequences, {len(result.engine_log_probs):,} sampled tokens "
        f"of step(s) {', '.join(map(str, result.steps))}"
    )
    print_table(
        title,
        ("trainer against engine", "native", "replay", "native / replay (95 %)"),
        comparison_rows(result),
    )
    print_table(
        "Route agreement",
        ("decoder layer", "engine's experts that the trainer's router picks too"),
        [(str(layer), f"{share:.2%}") for layer, share in zip(result.layers, result.agreement, strict=True)],
    )
    print(f"picture: {picture}")


def comparison_rows(result: Comparison) -> Iterator[tuple[str, str, str, str]]:
    """One row a metric: label, native, replay, and the factor where it has an interval."""
    factors = {"k3": result.k3_factor, "log_prob_abs_diff": result.abs_factor}
    for name, label in _ROWS:
        native, replay = f"{result.native[name]:.4g}", f"{result.replay[name]:.4g}"
        yield label, native, replay, _factor(factors[name]) if name in factors else ""


def _factor(interval: Interval) -> str:
    return f"{interval.value:.1f} ({interval.low:.1f} … {interval.high:.1f})"
