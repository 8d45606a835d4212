"""Every key of a run file with its type, default and meaning, read from the sections themselves."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from onroute.core.config.catalog import Catalogs
from onroute.core.config.keys import Key, keys_of, slots_of, type_label
from onroute.core.config.sections import RunConfig

REQUIRED = "required"
_SHORT_EXPONENT = re.compile("e-0+")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDescription:
    """One key. `default` is written as TOML would, `none` or `required`."""

    key: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A key and the catalogue entry it names. `active`: it does unless the run file says otherwise."""

    key: str
    entry: str
    active: bool

    def __str__(self) -> str:
        return f'{self.key} = "{self.entry}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDescription:
    """One table of a run file: a section, or the options of the catalogue entry that `variant` names."""

    name: str
    keys: tuple[KeyDescription, ...]
    variant: Variant | None = None


def describe(catalogs: Catalogs) -> list[KeyDescription]:
    """All keys, section by section; the options of catalogue entries follow the section they live in."""
    return [
        key if table.variant is None else replace(key, meaning=f"With {table.variant}: {key.meaning}")
        for table in describe_tables(catalogs)
        for key in table.keys
    ]


def describe_tables(catalogs: Catalogs) -> list[TableDescription]:
    """All tables of a run file in the order in which they are written down."""
    tables: list[TableDescription] = []
    for name, section in get_type_hints(RunConfig).items():
        keys = tuple(_with_choices(key, catalogs) for key in _describe_class(name, section))
        tables.append(TableDescription(name=name, keys=keys))
        tables += _describe_options(keys, catalogs)
    return tables


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


def _describe_class(prefix: str, section: type[Any]) -> tuple[KeyDescription, ...]:
    texts = meanings(section)
    return tuple(
        KeyDescription(
            key=f"{prefix}.{name}",
            type=type_label(key.hint),
            default=_default_label(key),
            meaning=texts.get(name, ""),
        )
        for name, key in keys_of(section).items()
    )


def _describe_options(section: Sequence[KeyDescription], catalogs: Catalogs) -> Iterator[TableDescription]:
    """The option tables of the entries that a section's keys may name."""
    defaults = {key.key: key.default for key in section}
    for slot, entries in slots_of(catalogs):
        if slot.options is None or slot.key not in defaults:
            continue
        for number, entry in enumerate(entries.values()):
            if entry.options is not None:
                default = defaults[slot.key]
                active = number == 0 if default == REQUIRED else default == json.dumps(entry.name)
                yield TableDescription(
                    name=slot.options,
                    keys=_describe_class(slot.options, entry.options),
                    variant=Variant(key=slot.key, entry=entry.name, active=active),
                )


def _with_choices(key: KeyDescription, catalogs: Catalogs) -> KeyDescription:
    """A key that names a catalogue entry, its meaning with what it may name."""
    for slot, entries in slots_of(catalogs):
        if slot.key == key.key:
            choices = "; ".join(f"{entry.name}: {entry.summary}" for entry in entries.values())
            return replace(key, meaning=f"{key.meaning} ({choices})")
    return key


def _default_label(key: Key) -> str:
    if key.required:
        return REQUIRED
    if key.default is None:
        return "none"
    if key.default == {}:
        return "{}"
    return _SHORT_EXPONENT.sub("e-", json.dumps(key.default))
