"""What can go wrong, as one line: `[code] what; where; what to do`, with an exit code per kind of cause."""

from __future__ import annotations


class OnrouteError(Exception):
    """Base of all errors this package raises on purpose.

    The arguments stay plain strings, so that an error survives pickling between processes.
    """

    exit_code = 1

    def __init__(self, code: str, what: str, where: str, fix: str) -> None:
        super().__init__(code, what, where, fix)
        self.code, self.what, self.where, self.fix = code, what, where, fix

    def __str__(self) -> str:
        return f"[{self.code}] {self.what}; {self.where}; {self.fix}"


class UserError(OnrouteError):
    """The user can mend it: a wrong key, a missing file, a model that does not fit the run."""

    exit_code = 2


class CheckError(OnrouteError):
    """A check of ours failed: replay fell short, weights did not arrive, a number is not finite."""

    exit_code = 3


class MachineError(OnrouteError):
    """The machine or an engine failed: out of memory, a dead process, a deadline that passed."""

    exit_code = 4


INTERRUPTED = 130
"""Exit code of a run that was ended by Ctrl-C or SIGTERM."""
