"""Where the values of a run come from: a TOML file, then `--section.key=value` on the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from onroute.core.config.keys import TypeHint, members, origin
from onroute.core.config.violations import ConfigError, Violation

Table: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLineText:
    """A value from the command line, not yet read: what it means depends on the key's type."""

    text: str

    def read(self, hint: TypeHint) -> object:
        """The text as TOML reads it; as it stands where it is no TOML or the key takes a string."""
        try:
            document = tomllib.loads(f"value = {self.text}")
        except tomllib.TOMLDecodeError:
            return self.text
        value: object = document["value"] if len(document) == 1 else self.text
        kinds = members(hint)
        takes_text = any(kind is str or origin(kind) is Literal for kind in kinds)
        return self.text if takes_text and type(value) not in (str, *kinds) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The merged tree of values and who gave them. Leaves from the command line are `CommandLineText`."""

    file: Path
    tree: Table
    overridden: frozenset[str]
    violations: tuple[Violation, ...]

    def locate(self, violation: Violation) -> Violation:
        """Say in `where` which file or flag is to blame."""
        flags = [
            flag
            for flag in sorted(self.overridden)
            if any(f"{key}.".startswith(f"{flag}.") or flag.startswith(f"{key}.") for key in violation.keys)
        ]
        if flags:
            return replace(violation, where=", ".join(f"--{flag}" for flag in flags) + " on the command line")
        keys = ", ".join(violation.keys)
        return replace(violation, where=f"{keys} in {self.file}" if keys else violation.where)


def read_sources(file: Path, overrides: Sequence[str]) -> Sources:
    """Read `file` and lay the overrides over it.

    Raises:
        ConfigError: the file cannot be read or is no TOML.
    """
    tree = _read_toml(file)
    overridden, violations = set(), []
    for override in _with_their_values(overrides):
        # With a space in place of = the value is still known; only the space is then a mistake.
        key, value = _split(_with_equals(override))
        problem = _put(tree, key, value) if key else "is not of the form --section.key=value"
        fix = "write it like --optimizer.lr=1e-6"
        if problem is None and override != _with_equals(override):
            problem, fix = "has a space in place of =", f"write {_with_equals(override)}"
        if problem is None:
            overridden.add(key)
        else:
            what = f"{override} {problem}"
            violations.append(Violation(code="config-override", what=what, where="command line", fix=fix))
    return Sources(file=file, tree=tree, overridden=frozenset(overridden), violations=tuple(violations))


def _with_their_values(overrides: Sequence[str]) -> list[str]:
    """The overrides; a value that follows its key after a space stays with it, so that it is told once."""
    joined: list[str] = []
    for text in overrides:
        is_key = bool(joined) and joined[-1].startswith("--") and not {" ", "="} & set(joined[-1])
        if is_key and not text.startswith("--"):
            joined[-1] += f" {text}"
        else:
            joined.append(text)
    return joined


def _with_equals(override: str) -> str:
    """`--run.folder runs/x` as `--run.folder=runs/x`."""
    key, space, value = override.partition(" ")
    return f"{key}={value}" if space and "=" not in key else override


def _read_toml(file: Path) -> Table:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except FileNotFoundError:
        what, fix = "there is no such file", "give the path of a run file"
        if str(file).startswith("--"):
            fix = "give the run file first and what overrides it after it"
    except IsADirectoryError:
        what, fix = (
            "this is a folder, not a run file",
            "give the path of the TOML file",
        )
    except OSError as error:
        what, fix = f"the file cannot be read: {error.strerror}", "make it readable or give another path"
    except UnicodeDecodeError as error:
        what, fix = f"the file is not UTF-8 text: byte {error.start}", "save it as UTF-8"
    except tomllib.TOMLDecodeError as error:
        what, fix = (
            f"the file is not TOML: {error}",
            "mend that place; strings need quotes",
        )
    raise ConfigError([Violation(code="config-file", what=what, where=str(file), fix=fix)])


def _split(override: str) -> tuple[str, CommandLineText]:
    """`--a.b=c` as key and value; an empty key when it is not of that form."""
    key, equals, text = override.removeprefix("--").partition("=")
    well_formed = override.startswith("--") and equals and "." in key and all(key.split("."))
    return key if well_formed else "", CommandLineText(text=text)


def _put(tree: Table, key: str, value: CommandLineText) -> str | None:
    """Set a dotted key, making tables on the way. Returns what is wrong when a value is in the way."""
    *tables, name = key.split(".")
    for depth, table in enumerate(tables):
        inner = tree.setdefault(table, {})
        if not isinstance(inner, dict):
            return f"reaches into {'.'.join(tables[: depth + 1])}, which is a value and not a table"
        tree = inner
    tree[name] = value
    return None


def plain(raw: object, hint: TypeHint = None) -> object:
    """`raw` with every text from the command line read."""
    if isinstance(raw, CommandLineText):
        return raw.read(hint)
    if isinstance(raw, dict):
        return {name: plain(value) for name, value in raw.items()}
    return raw


def subtable(tree: Table, path: str) -> Table:
    """The table at a dotted path; empty where there is none."""
    for name in path.split("."):
        inner = plain(tree.get(name))
        tree = inner if isinstance(inner, dict) else {}
    return tree
