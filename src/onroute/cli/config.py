"""`onroute config`: every key of a run file, and the tasks that an environment can be asked for."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from onroute.core.config.describe import TableDescription
    from onroute.core.samples import Json


def config(
    name: Annotated[
        str | None,
        typer.Argument(help="One section only, e.g. optimizer; with --tasks one task.", metavar="SECTION"),
    ] = None,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print a run file to fill in.")] = False,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="List the reasoning-gym tasks, or the parameters of one.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the keys, or the tasks, as one line of JSON.")
    ] = False,
) -> None:
    """List every key of a run file with its type, default and meaning.

    Example: onroute config optimizer
    """
    from onroute.cli.catalogs import CATALOGS
    from onroute.cli.output import print_json
    from onroute.core.config.describe import describe, describe_tables

    width = shutil.get_terminal_size().columns
    if tasks:
        _print_tasks(name, width, as_json=as_json)
        return
    tables = _chosen(describe_tables(CATALOGS), name)
    if as_json:
        known = {table.name for table in tables}
        print_json([key for key in describe(CATALOGS) if key.key.rpartition(".")[0] in known])
        return

    from onroute.cli.listing import listing, skeleton

    _print((skeleton if as_toml else listing)(tables, width))


def _chosen(tables: Sequence[TableDescription], name: str | None) -> list[TableDescription]:
    """The tables of one section, or all. Raises UserError when there is no such section."""
    sections = list(dict.fromkeys(table.name.partition(".")[0] for table in tables))
    if name is None or name in sections:
        return [table for table in tables if name in (None, table.name.partition(".")[0])]

    from onroute.core.config.keys import nearest
    from onroute.core.config.unknown import suggest
    from onroute.core.errors import UserError

    section = name.strip("[]").partition(".")[0]
    near = section if section in sections else nearest(section, sections)
    fix = suggest(near, f"the sections are {', '.join(sections)}")
    raise UserError("config-unknown-section", f"there is no section {name}", "command line", fix)


def _print_tasks(name: str | None, width: int, *, as_json: bool) -> None:
    from onroute.cli.output import print_json
    from onroute.core.errors import UserError
    from onroute.environments.tasks import load_task, task_names, task_parameters

    if name is None:
        names = task_names()
        if as_json:
            print_json(names)
        else:
            _print(textwrap.wrap(", ".join(names), width, break_on_hyphens=False))
            _print(["", "`onroute config --tasks NAME` shows the parameters of one and its first problem."])
        return
    # Some defaults are dates and records of the library, which JSON and TOML tell as text.
    parameters: dict[str, Json] = json.loads(json.dumps(task_parameters(name), default=str))
    if as_json:
        print_json(parameters)
        return
    _print(["[environment.options]", f'task = "{name}"', "", "[environment.options.parameters]"])
    _print(
        f"#{key} =  # not set by default" if value is None else f"{key} = {json.dumps(value)}"
        for key, value in parameters.items()
    )
    try:
        question = load_task(name, {}, seed=0).problem("train", 0).question
    except UserError as error:
        _print(["", f"These alone make no problem: {error.what}."])
    else:
        _print(["", "The first problem with these parameters:", "", question])


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
