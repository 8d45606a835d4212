"""Names that a run file uses and nothing declares, each with the name that was probably meant."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from onroute.core.config.catalog import Catalog, CatalogEntry, Catalogs
from onroute.core.config.keys import Slot, keys_of, nearest, nearest_key, slots_of
from onroute.core.config.sources import Table, subtable
from onroute.core.config.violations import Violation


def chosen(slot: Slot, tables: Mapping[str, Table], entries: Catalog) -> CatalogEntry | None:
    """The catalogue entry that a slot's key names; None when there is no such entry."""
    section, _, name = slot.key.partition(".")
    value = tables[section][name]
    return entries.get(value) if isinstance(value, str) else None


def unknown_names(slot: Slot, tables: Mapping[str, Table], entries: Catalog) -> list[Violation]:
    """Values of a slot's key that are in no catalogue."""
    section, _, key = slot.key.partition(".")
    value = tables[section][key]
    names = value if isinstance(value, tuple) else (value,)
    return [
        Violation(
            code="config-unknown-name",
            what=f'{slot.key}: there is no "{name}"',
            where=slot.key,
            fix=suggest(nearest(name, entries), f"choose one of {', '.join(sorted(entries)) or 'none'}"),
            keys=(slot.key,),
        )
        for name in names
        if isinstance(name, str) and name not in entries
    ]


def unknown_keys(tree: Table, tables: Mapping[str, Table], catalogs: Catalogs) -> list[Violation]:
    """Sections, keys and options that nothing declares. `tables` holds the declared keys of each section."""
    declared = dict(_declared(tables, catalogs))
    known = {f"{table}.{name}" for table, names in declared.items() for name in names}
    violations = [_unknown_at_top(name, tree, known, tables) for name in tree if name not in tables]
    for table, names in declared.items():
        violations += [
            _unknown_key(f"{table}.{name}", known, names)
            for name in subtable(tree, table)
            if name not in names
        ]
    return violations


def suggest(near: str | None, otherwise: str) -> str:
    return f"did you mean {near}?" if near else otherwise


def _declared(tables: Mapping[str, Table], catalogs: Catalogs) -> Iterator[tuple[str, Sequence[str]]]:
    """The key names of every section and of every option table whose catalogue entry is known."""
    for section, table in tables.items():
        yield section, list(table)
    for slot, entries in slots_of(catalogs):
        entry = chosen(slot, tables, entries)
        if slot.options is not None and entry is not None:
            yield slot.options, list(keys_of(entry.options)) if entry.options else []


def _unknown_at_top(name: str, tree: Table, known: Collection[str], sections: Collection[str]) -> Violation:
    if isinstance(tree[name], dict):
        kind, near = "section", nearest(name, sections)
        otherwise = f"the sections are {', '.join(sections)}"
    else:
        kind, near = "key", nearest_key(name, known)
        otherwise = "put it under the [section] it belongs to"
    return Violation(
        code=f"config-unknown-{kind}",
        what=f"there is no {kind} {name}",
        where=name,
        fix=suggest(near, otherwise),
        keys=(name,),
    )


def _unknown_key(key: str, known: Collection[str], siblings: Sequence[str]) -> Violation:
    table = key.rpartition(".")[0]
    otherwise = (
        f"{table} takes {', '.join(siblings)}" if siblings else f"leave it out, {table} takes no keys here"
    )
    return Violation(
        code="config-unknown-key",
        what=f"there is no key {key}",
        where=key,
        fix=suggest(nearest_key(key, sorted(known)), otherwise),
        keys=(key,),
    )
