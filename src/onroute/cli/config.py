"""`onroute config`: every key of a run file."""

from __future__ import annotations

from dataclasses import astuple
from typing import Annotated

import typer


def config(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array of all keys.")] = False,
) -> None:
    """List every key of a run file with its type, default and meaning."""
    from onroute.cli.catalogs import CATALOGS
    from onroute.cli.output import print_json, print_table
    from onroute.core.config.describe import describe

    lines = describe(CATALOGS)
    if as_json:
        print_json(lines)
    else:
        print_table("Keys of a run file", ("key", "type", "default", "meaning"), map(astuple, lines))
