"""What is wrong with a run file: all of it at once, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onroute.core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing that is wrong. `keys` are the dotted keys it is about, `where` says it for people."""

    code: str
    what: str
    where: str
    fix: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"[{self.code}] {self.what}; {self.where}; {self.fix}"


class ConfigError(UserError):
    """A run file that cannot be used. Its text has one line for each violation."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        first = violations[0]
        super().__init__(first.code, first.what, first.where, first.fix)
        self.violations = tuple(violations)
        self.args = (self.violations,)

    def __str__(self) -> str:
        return "\n".join(map(str, self.violations))
