"""The `onroute` command. A command's file imports what is heavy only when the command runs."""

from __future__ import annotations

import importlib.metadata
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Annotated

import typer

from onroute.cli.check import check
from onroute.cli.compare import compare
from onroute.cli.config import config
from onroute.cli.demo import demo
from onroute.cli.export import export
from onroute.cli.failures import guarded
from onroute.cli.help import PlainHelp
from onroute.cli.train import train


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`overrides`: takes `--section.key=value`, which the command itself reads."""

    run: Callable[..., None]
    overrides: bool = False


COMMANDS = (
    Command(run=demo, overrides=True),
    Command(run=train, overrides=True),
    Command(run=check),
    Command(run=compare),
    Command(run=export),
    Command(run=config),
)

app = typer.Typer(
    help="Reinforcement-learning post-training on the route that the tokens really took.",
    epilog="python -m onroute.training trains on recorded rollouts, alone or under torchrun.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _onroute(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"onroute {importlib.metadata.version('onroute')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


for command in COMMANDS:
    settings = {"ignore_unknown_options": command.overrides}
    app.command(cls=PlainHelp, context_settings=settings)(guarded(command.run))


def main() -> None:
    """Run one command and exit with its code; SIGTERM ends it as Ctrl-C does."""
    # A job that a script put in the background starts with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    app(prog_name="onroute")


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Hand over to whoever handles Ctrl-C at this moment: Python, or asyncio while it runs a loop."""
    signal.raise_signal(signal.SIGINT)
