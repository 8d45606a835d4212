"""The keys of a run file as text: a listing to read, and a run file to fill in."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from onroute.core.config.describe import REQUIRED, KeyDescription, TableDescription

NOT_SET = "none"
_INDENT = "    "


def listing(tables: Sequence[TableDescription], width: int) -> Iterator[str]:
    """Lines of at most `width` columns, where no key is longer: `key = default  # type`, then its meaning."""
    for table in tables:
        yield f"[{table.name}]{_condition(table)}"
        for key in table.keys:
            line, *texts = _key_and_texts(key, width)
            yield line
            for text in texts:
                yield from textwrap.wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
        yield ""
    yield from textwrap.wrap(
        "Every key can be given on the command line too, e.g. --optimizer.lr=1e-6.", width
    )


def skeleton(tables: Sequence[TableDescription], width: int) -> Iterator[str]:
    """A run file with every key at its default, behind a `#`; those that are required wait for a value.

    The options of variants that nothing chooses yet stand behind a `#` as whole tables.
    """
    yield "# A run file. A key behind a # has the default that it shows;"
    yield "# those without want a value."
    variants = [table.variant for table in tables if table.variant is not None]
    chosen = {variant.key: variant.entry for variant in variants if variant.active}
    elsewhere = {table.name for table in tables if table.variant is not None}
    for table in tables:
        yield ""
        yield f"{'' if _is_active(table) else '#'}[{table.name}]{_condition(table)}"
        for key in table.keys:
            if key.key not in elsewhere:
                line, *texts = _key_and_texts(_with_example(key, chosen), width - 1)
                for text in texts:
                    yield from textwrap.wrap(text, width, initial_indent="# ", subsequent_indent="# ")
                yield line if key.default == REQUIRED and _is_active(table) else f"#{line}"


def _is_active(table: TableDescription) -> bool:
    return table.variant is None or table.variant.active


def _condition(table: TableDescription) -> str:
    return "" if table.variant is None else f"  # with {table.variant}"


def _with_example(key: KeyDescription, chosen: Mapping[str, str]) -> KeyDescription:
    if key.default != REQUIRED:
        return key
    return replace(key, default=f'"{chosen.get(key.key, "")}"', type=f"{key.type}, required")


def _key_and_texts(key: KeyDescription, width: int) -> list[str]:
    """The line of the key, and what stands beneath: its type where the line has no room, its meaning."""
    name = key.key.rpartition(".")[2]
    kind = key.type.removesuffix(f" or {NOT_SET}")
    line = f"{name} = {key.default}"
    if key.default == REQUIRED:
        line, kind = f"{name} =", f"{kind}, required"
    if key.default == NOT_SET:
        line, kind = f"{name} =", f"{kind}, not set by default"
    whole = f"{line}  # {kind}"
    return (
        [whole, key.meaning] if len(whole) <= width else [line, f"{kind[0].upper()}{kind[1:]}.", key.meaning]
    )
