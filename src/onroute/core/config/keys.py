"""The keys of a section, read from its dataclass, and the places where a key names a catalogue entry."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from onroute.core.config.catalog import Catalog, Catalogs

TypeHint: TypeAlias = Any
"""What `typing.get_type_hints` gives: a class, a union, a generic alias."""

TOML_NAMES: Mapping[TypeHint, str] = {str: "string", int: "integer", float: "float", bool: "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One field of a section or of an options class. `default` means nothing when `required`."""

    name: str
    hint: TypeHint
    required: bool
    default: object


def keys_of(section: type[Any]) -> dict[str, Key]:
    """The keys of a dataclass by name, in the order in which they are written down."""
    hints = get_type_hints(section)
    keys = {}
    for field in fields(section):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        keys[field.name] = Key(
            name=field.name, hint=hints[field.name], required=default is MISSING, default=default
        )
    return keys


def origin(hint: TypeHint) -> TypeHint:
    """What a generic alias or a union is made of: `tuple`, `Mapping`, `Literal`; None for a class."""
    return get_origin(hint)


def members(hint: TypeHint) -> tuple[TypeHint, ...]:
    """The alternatives of a union; any other hint is its own only one."""
    return get_args(hint) if origin(hint) in (Union, types.UnionType) else (hint,)


def is_table(hint: TypeHint) -> bool:
    return origin(hint) in (Mapping, dict)


def is_free_table(hint: TypeHint) -> bool:
    """A table whose values are of any kind, e.g. `Mapping[str, Json]`."""
    return is_table(hint) and get_args(hint)[-1] not in TOML_NAMES


def type_label(hint: TypeHint) -> str:
    """The type in TOML's own words: `integer or none`, `one of "rows", "packed"`, `array of 2 floats`."""
    alternatives = members(hint)
    if len(alternatives) > 1:
        return " or ".join(type_label(a) for a in alternatives)
    if origin(hint) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(hint))
    if origin(hint) is tuple:
        items = get_args(hint)
        count = "" if items[-1] is Ellipsis else f"{len(items)} "
        return f"array of {count}{type_label(items[0])}s"
    if is_table(hint):
        return "table"
    if hint is type(None):
        return "none"
    return TOML_NAMES.get(hint, "value")


def choices_of(hint: TypeHint) -> list[str]:
    """The words that a key may be, where it is not free."""
    return [choice for kind in members(hint) if origin(kind) is Literal for choice in get_args(kind)]


def how_to_write(hint: TypeHint, default: object) -> str:
    """What to write for a value of this type, with an example: `give a whole number, e.g. 100`."""
    kinds = [kind for kind in members(hint) if kind is not type(None)]
    text = "give " + " or ".join(_how_to_write(kind, default) for kind in kinds)
    return text if len(kinds) == len(members(hint)) else f"{text}, or leave the key out"


def _how_to_write(hint: TypeHint, default: object) -> str:
    if hint is bool:
        return "true or false"
    if hint is int:
        return "a whole number, e.g. 100"
    if hint is float:
        return "a number, e.g. 0.5 or 1e-6"
    if hint is str:
        return 'text in quotes, e.g. "abc"'
    if origin(hint) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(hint))
    if is_table(hint):
        return "a table, e.g. { key = 1 }"
    if origin(hint) is tuple and isinstance(default, tuple) and default:
        return f"an {type_label(hint)}, e.g. {json.dumps(default)}"
    return f"an {type_label(hint)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A key whose value names an entry of a catalogue, and the table that holds the entry's own keys."""

    key: str
    entries: Callable[[Catalogs], Catalog | None]
    options: str | None = None


SLOTS = (
    Slot(key="engine.name", entries=lambda c: c.engines),
    Slot(key="environment.name", entries=lambda c: c.environments, options="environment.options"),
    Slot(key="algorithm.advantage", entries=lambda c: c.advantages, options="algorithm.advantage_options"),
    Slot(key="algorithm.loss", entries=lambda c: c.losses, options="algorithm.loss_options"),
    Slot(key="tracking.trackers", entries=lambda c: c.trackers),
)


def slots_of(catalogs: Catalogs) -> list[tuple[Slot, Catalog]]:
    """Every slot whose catalogue is given, with that catalogue."""
    found = ((slot, slot.entries(catalogs)) for slot in SLOTS)
    return [(slot, entries) for slot, entries in found if entries is not None]


def nearest(wrong: str, known: Collection[str]) -> str | None:
    """The known name that was most likely meant: a typo, or a word for its initials (learning_rate, lr)."""
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    initials = "".join(word[:1] for word in wrong.replace("-", "_").split("_"))
    return initials if initials in known and len(initials) > 1 else None


def nearest_key(wrong: str, known: Collection[str]) -> str | None:
    """The dotted key that was most likely meant by a dotted key that does not exist.

    A like name in the same table comes first, then the same name in another, then a like path.
    """
    table, _, name = wrong.rpartition(".")
    siblings = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == table}
    here = nearest(name, siblings)
    if here is not None:
        return siblings[here]
    elsewhere = [path for path in known if path.rpartition(".")[2] == name]
    if elsewhere:
        return elsewhere[0]
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.75)
    return close[0] if close else None
