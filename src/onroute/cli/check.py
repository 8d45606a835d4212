"""`onroute check`: can this model be trained on replayed routes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def check(
    model: Annotated[Path, typer.Argument(help="A Hugging Face model folder.", metavar="MODEL")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object with the results as the last line.")
    ] = False,
) -> None:
    """Prove routing replay on a model, or say why not.

    Example: onroute check runs/demo-model
    """
    from onroute.cli.output import print_json, print_table
    from onroute.models.world import open_world
    from onroute.training.check import check_model

    with open_world(timeout_s=600) as world:
        result = check_model(model, world)
    routing_map = result.report.map if result.report is not None else None
    rows = result.report.rows if result.report is not None else ()
    if as_json:
        print_json(
            {
                "model_type": result.model_type,
                "attention": result.attention,
                "moe_layers": routing_map.layers if routing_map is not None else (),
                "num_experts": routing_map.num_experts if routing_map is not None else 0,
                "top_k": routing_map.top_k if routing_map is not None else 0,
                "replay": result.replay,
                "reason": result.reason,
                "checks": {row.name: row.passed for row in rows},
                "layouts": result.layouts,
            }
        )
    else:
        title = f"{model}: {result.model_type}, replay {result.replay}"
        table = [(row.name.replace("_", " "), "ok" if row.passed else "FAILED", row.detail) for row in rows]
        table.append(("layouts", "ok", f"{', '.join(result.layouts)} (attention {result.attention})"))
        print_table(title, ("check", "result", "detail"), table)
        if result.reason:
            print(result.reason)
    if result.replay != "ok":
        raise typer.Exit(3)
