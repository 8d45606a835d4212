"""A run file and command-line overrides become one validated `RunConfig`.

pydantic checks each value against the type that its field declares, strictly. The walk over the sections
is ours: tyro and cyclopts stop at the first mistake, and pydantic over whole dataclasses ignores unknown
keys and cannot follow the recursive type of the option tables.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w
from pydantic import ConfigDict, TypeAdapter

from onroute.core.config.catalog import CatalogEntry, Catalogs
from onroute.core.config.keys import (
    Key,
    TypeHint,
    choices_of,
    how_to_write,
    is_free_table,
    keys_of,
    members,
    nearest,
    slots_of,
    type_label,
)
from onroute.core.config.rules import broken_rules
from onroute.core.config.sections import RunConfig
from onroute.core.config.sources import CommandLineText, Table, plain, read_sources, subtable
from onroute.core.config.unknown import chosen, suggest, unknown_keys, unknown_names
from onroute.core.config.violations import ConfigError, Violation
from onroute.core.errors import OnrouteError
from onroute.core.samples import Json


def load_config(path: Path, overrides: Sequence[str], catalogs: Catalogs) -> RunConfig:
    """The config of a run: defaults, then the file, then overrides of the form `--section.key=value`.

    The options of the chosen catalogue entries are filled in with their defaults.

    Raises:
        ConfigError: with everything that is wrong, one violation each.
    """
    sources = read_sources(path, overrides)
    tables, violations = _read_sections(sources.tree)
    unusable = {key for violation in violations for key in violation.keys}
    violations += _read_slots(tables, sources.tree, catalogs, unusable=unusable)
    violations += unknown_keys(sources.tree, tables, catalogs)
    config = RunConfig(**{name: cls(**tables[name]) for name, cls in get_type_hints(RunConfig).items()})
    unusable |= {key for violation in violations for key in violation.keys}
    violations += broken_rules(config, catalogs, unusable=unusable)
    violations = [*sources.violations, *map(sources.locate, violations)]
    if violations:
        raise ConfigError(violations)
    return config


def dump_toml(config: RunConfig) -> str:
    """The config as a run file that loads to an equal one. A key that is None is left out: its default."""
    return tomli_w.dumps(_without_none(asdict(config)))


def _without_none(table: Table) -> Table:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The values of one table, each of its declared type, and what could not be read.

    A key that could not be read stands at its default, a required one at None, so that the other
    rules can still be asked; the violations see to it that such a config never leaves this module.
    """

    values: Table
    violations: list[Violation]


def _read_sections(tree: Table) -> tuple[dict[str, Table], list[Violation]]:
    tables: dict[str, Table] = {}
    violations: list[Violation] = []
    for name, section in get_type_hints(RunConfig).items():
        raw = tree.get(name, {})
        if not isinstance(raw, dict):
            violations.append(_wrong_type(name, Mapping[str, Json], raw, default={}))
            raw = {}
        reading = _read_table(name, section, raw)
        tables[name] = reading.values
        violations += reading.violations
    return tables, violations


def _read_slots(
    tables: dict[str, Table], tree: Table, catalogs: Catalogs, *, unusable: Collection[str]
) -> list[Violation]:
    """Look up every name in its catalogue and put the options of the entry in place."""
    violations: list[Violation] = []
    for slot, entries in slots_of(catalogs):
        violations += unknown_names(slot, tables, entries)
        entry = chosen(slot, tables, entries)
        if slot.options is not None and entry is not None and slot.options not in unusable:
            reading = _read_options(slot.options, entry, subtable(tree, slot.options))
            section, _, name = slot.options.partition(".")
            tables[section][name] = reading.values
            violations += reading.violations
    return violations


def _read_options(prefix: str, entry: CatalogEntry, raw: Table) -> _Reading:
    """The entry's own keys, and what its options class has to say about them."""
    if entry.options is None:
        return _Reading(values={}, violations=[])
    reading = _read_table(prefix, entry.options, raw)
    if not reading.violations:
        try:
            entry.options(**reading.values)
        except (ValueError, OnrouteError) as error:
            what, fix = str(error), "see `onroute config`"
            if isinstance(error, OnrouteError):
                what, fix = error.what, error.fix
            reading.violations.append(
                Violation(code="config-options", what=what, where=prefix, fix=fix, keys=(prefix,))
            )
    return reading


def _read_table(prefix: str, declared: type[Any], raw: Table) -> _Reading:
    values: Table = {}
    violations: list[Violation] = []
    for name, key in keys_of(declared).items():
        values[name] = None if key.required else key.default
        path = f"{prefix}.{name}"
        if name not in raw:
            violations += [_missing(path, key)] if key.required else []
            continue
        try:
            values[name] = _read_value(key.hint, raw[name])
        except ValueError:
            violations.append(_wrong_type(path, key.hint, raw[name], default=key.default))
    return _Reading(values=values, violations=violations)


def _read_value(hint: TypeHint, raw: object) -> object:
    """`raw` as the declared type.

    Raises:
        ValueError: it is something else.
    """
    value = plain(raw, hint)
    if isinstance(value, str) and str not in members(hint):
        value = _from_text(value, hint)
    # JSON mode is the strict one that lets an array become a tuple and a whole number a float.
    known_type = dict[str, Any] if is_free_table(hint) else hint
    adapter: TypeAdapter[object] = TypeAdapter(known_type, config=ConfigDict(strict=True))
    return adapter.validate_json(json.dumps(value, default=str))


def _from_text(value: str, hint: TypeHint) -> object:
    """Text that means a number or none where no text is asked for: "5e-6", "none"."""
    if type(None) in members(hint) and value.lower() == "none":
        return None
    return float(value) if float in members(hint) else value


def _missing(path: str, key: Key) -> Violation:
    return Violation(
        code="config-missing",
        what=f"{path} is not set and has no default",
        where=path,
        fix=f"set it under [{path.rpartition('.')[0]}]: {how_to_write(key.hint, key.default)}",
        keys=(path,),
    )


def _wrong_type(path: str, expected: TypeHint, raw: object, *, default: object) -> Violation:
    given = raw.text if isinstance(raw, CommandLineText) else json.dumps(plain(raw), default=str)
    near = nearest(f'"{given.strip(chr(34))}"', [f'"{choice}"' for choice in choices_of(expected)])
    return Violation(
        code="config-type",
        what=f"{path} takes {type_label(expected)}, got {given}",
        where=path,
        fix=suggest(near, how_to_write(expected, default)),
        keys=(path,),
    )
