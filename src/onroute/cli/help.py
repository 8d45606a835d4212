"""The help of a command: arguments under the names that its usage line has, without Python's types."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class PlainHelp(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options of the command, one a line."""
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                name = str(param.metavar) if is_argument else record[0]
                rows["Arguments" if is_argument else "Options"].append((name, record[1]))
        for heading, lines in rows.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)
