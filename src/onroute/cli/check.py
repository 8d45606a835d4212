"""`onroute check`: can this model be trained on replayed routes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from onroute.training.check import ModelCheck


def check(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A Hugging Face model folder, or tiny:TYPE for a random model of a type.", metavar="MODEL"
        ),
    ] = None,
    all_families: Annotated[
        bool, typer.Option("--all-families", help="Every routing model type of the installed transformers.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON in the last line.")
    ] = False,
) -> None:
    """Prove routing replay on a model, or say why not.

    Example: onroute check runs/demo-model
    """
    from onroute.cli.output import print_json
    from onroute.core.errors import UserError
    from onroute.models.families.build import PREFIX
    from onroute.models.families.scan import routing_model_types
    from onroute.models.world import open_world
    from onroute.training.check import as_expected, check_family, check_model

    if (model is None) != all_families:
        raise UserError(
            "check-model", "nothing or too much to check", "onroute check", "give MODEL or --all-families"
        )
    with open_world(timeout_s=600) as world:
        if model is None:
            rows = [check_family(model_type, world) for model_type in routing_model_types()]
            print_json([_as_row(row) for row in rows]) if as_json else _print_families(rows)
            passed = all(map(as_expected, rows))
        else:
            name = str(model)
            tiny = name.startswith(PREFIX)
            found = check_family(name.removeprefix(PREFIX), world) if tiny else check_model(model, world)
            print_json(_as_row(found)) if as_json else _print_model(name, found)
            passed = found.replay == "ok"
    if not passed:
        raise typer.Exit(3)


def _as_row(found: ModelCheck) -> dict[str, object]:
    report = found.report
    return {
        "model_type": found.model_type,
        "attention": found.attention,
        "moe_layers": report.map.layers if report is not None else (),
        "num_experts": report.map.num_experts if report is not None else 0,
        "top_k": report.map.top_k if report is not None else 0,
        "left_live": (*report.map.outside, *report.map.live) if report is not None else (),
        "replay": found.replay,
        "reason": found.reason,
        "checks": {row.name: row.passed for row in report.rows} if report is not None else {},
        "layouts": found.layouts,
    }


def _print_model(name: str, found: ModelCheck) -> None:
    from onroute.cli.output import print_table

    rows = found.report.rows if found.report is not None else ()
    table = [(row.name.replace("_", " "), "ok" if row.passed else "FAILED", row.detail) for row in rows]
    if found.layouts:
        table.append(("layouts", "ok", f"{', '.join(found.layouts)} (attention {found.attention})"))
    print_table(f"{name}: {found.model_type}, replay {found.replay}", ("check", "result", "detail"), table)
    if found.reason:
        print(found.reason)


def _print_families(rows: Sequence[ModelCheck]) -> None:
    from onroute.cli.output import print_table

    passed = sum(row.replay == "ok" for row in rows)
    table = []
    for row in rows:
        routing = row.report.map if row.report is not None else None
        shape = f"{len(routing.layers)} x {routing.num_experts}, top {routing.top_k}" if routing else ""
        table.append((row.model_type, row.replay, shape, row.reason))
    print_table(
        f"{passed} of {len(rows)} model types replay", ("model type", "replay", "routers", "reason"), table
    )
