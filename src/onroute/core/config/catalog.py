"""What a room offers by name, told to the config before the room is imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One variant of a room.

    target: dotted path of what implements it, `package.module:attribute`.
    summary: one line for `onroute config`.
    options: a frozen dataclass of the variant's own keys, documented like a config section.
    properties: what the variant declares of itself, e.g. `needs_groups`.
    """

    name: str
    target: str
    summary: str
    options: type[Any] | None = None
    properties: frozenset[str] = field(default_factory=frozenset)

    def load(self) -> Any:
        """The variant itself; imports its room."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def build_options(self, options: Mapping[str, object]) -> Any:
        """The variant's own frozen options, or None when it has no keys."""
        return None if self.options is None else self.options(**options)


Catalog: TypeAlias = Mapping[str, CatalogEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogs:
    """The catalogues of all rooms that have variants.

    A process that builds no engine gives no engines; `engine.name` is then taken as it stands.
    """

    engines: Catalog | None
    environments: Catalog
    advantages: Catalog
    losses: Catalog
    trackers: Catalog
