"""Every key of a run file with its type, default and meaning, read from the sections themselves."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

from onroute.core.config.catalog import Catalogs
from onroute.core.config.keys import Key, keys_of, slots_of, type_label
from onroute.core.config.sections import RunConfig

REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDescription:
    """One line of `onroute config`. `default` is written as TOML would, `none` or `required`."""

    key: str
    type: str
    default: str
    meaning: str


def describe(catalogs: Catalogs) -> list[KeyDescription]:
    """All keys, section by section; the options of catalogue entries follow the table they live in."""
    lines: list[KeyDescription] = []
    for name, section in get_type_hints(RunConfig).items():
        for line in _describe_class(name, section):
            choices = _choices(line.key, catalogs)
            lines.append(line if choices is None else _named(line, choices))
            lines += _describe_options(line.key, catalogs)
    return lines


def meanings(section: type[Any]) -> dict[str, str]:
    """The string written under each field of a dataclass, its bases included, on one line each."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for statement, following in itertools.pairwise(body):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def _describe_class(prefix: str, section: type[Any], note: str = "") -> Iterator[KeyDescription]:
    texts = meanings(section)
    for name, key in keys_of(section).items():
        yield KeyDescription(
            key=f"{prefix}.{name}",
            type=type_label(key.hint),
            default=_default_label(key),
            meaning=f"{note}{texts.get(name, '')}",
        )


def _describe_options(key: str, catalogs: Catalogs) -> Iterator[KeyDescription]:
    for slot, entries in slots_of(catalogs):
        if slot.options != key:
            continue
        for entry in entries.values():
            if entry.options is not None:
                yield from _describe_class(key, entry.options, note=f'With {slot.key} = "{entry.name}": ')


def _choices(key: str, catalogs: Catalogs) -> str | None:
    for slot, entries in slots_of(catalogs):
        if slot.key == key:
            return "; ".join(f"{entry.name}: {entry.summary}" for entry in entries.values())
    return None


def _named(line: KeyDescription, choices: str) -> KeyDescription:
    return KeyDescription(
        key=line.key, type=line.type, default=line.default, meaning=f"{line.meaning} ({choices})"
    )


def _default_label(key: Key) -> str:
    if key.required:
        return REQUIRED
    if key.default is None:
        return "none"
    if key.default == {}:
        return "{}"
    return json.dumps(key.default)
