"""The one place where an exception becomes a line on stderr and an exit code."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, Protocol

import typer

from onroute.cli.output import print_json
from onroute.core.errors import INTERRUPTED, MachineError, OnrouteError
from onroute.core.tracebacks import keep_traceback, traceback_of

P = ParamSpec("P")
UNEXPECTED = 1
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Told(Protocol):
    """An error or a violation: what an error's line says, in its parts."""

    @property
    def code(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def where(self) -> str: ...

    @property
    def fix(self) -> str: ...


class UnexpectedError(Exception):
    """An error nobody foresaw, with the file that holds its traceback."""

    def __init__(self, message: str, file: Path) -> None:
        super().__init__(message, file)
        self.message, self.file = message, file

    def __str__(self) -> str:
        return f"[unexpected] {self.message}; traceback in {self.file}; please report it with that file"


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """`command`, ending with its exit code and one line on stderr when it fails."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with tracebacks_in(None):
                command(*args, **kwargs)
        except OnrouteError as error:
            _tell_json(kwargs, error.exit_code, getattr(error, "violations", (error,)))
            raise _exit(str(error), error.exit_code) from error
        except UnexpectedError as error:
            known = MachineError(
                "unexpected", error.message, str(error.file), "please report it with that file"
            )
            _tell_json(kwargs, UNEXPECTED, (known,))
            raise _exit(str(error), UNEXPECTED) from error
        except KeyboardInterrupt as error:
            line = "interrupted; a run that wrote a checkpoint goes on from it with --run.resume=auto"
            _tell_json(kwargs, INTERRUPTED, ())
            raise _exit(line, INTERRUPTED) from error

    return run


@contextmanager
def tracebacks_in(folder: Path | None) -> Iterator[None]:
    """Write the traceback of an unforeseen error to `folder`, or to a new temporary file without one.

    Raises:
        OnrouteError: the body raised it, alone or in a group of errors.
        MachineError: the body ran out of memory or of disk space.
        UnexpectedError: the body raised anything else that is not ours.
    """
    try:
        yield
    except (OnrouteError, UnexpectedError, typer.Exit):
        raise
    except Exception as error:
        known = _known_error(error)
        if known is not None:
            raise known from error
        raise UnexpectedError(_one_line(error), keep_traceback(traceback_of(error), folder)) from error


def _tell_json(arguments: Mapping[str, object], exit_code: int, errors: Iterable[Told]) -> None:
    """The JSON object that `--json` promises, also when the command fails."""
    if arguments.get("as_json"):
        told = [{"code": e.code, "what": e.what, "where": e.where, "fix": e.fix} for e in errors]
        print_json({"exit_code": exit_code, "errors": told})


def _exit(line: str, code: int) -> typer.Exit:
    print(line, file=sys.stderr, flush=True)
    return typer.Exit(code)


def _known_error(error: Exception) -> OnrouteError | None:
    """The first error of a group that has a line of its own; tasks that run together fail as a group."""
    if isinstance(error, OnrouteError):
        return error
    if isinstance(error, ExceptionGroup):
        return next(filter(None, map(_known_error, error.exceptions)), None)
    return _machine_error(error)


def _machine_error(error: Exception) -> MachineError | None:
    """The errors of a machine that ran out of something. torch is not imported to tell its own."""
    text = _one_line(error)
    disk_full = isinstance(error, OSError) and error.errno in DISK_FULL
    if disk_full or "No space left on device" in text:
        where = str(getattr(error, "filename", None) or "run folder")
        return MachineError(
            "machine-disk", "no space left on the disk", where, "free some space, then resume"
        )
    out_of_memory = isinstance(error, MemoryError) or any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    )
    if out_of_memory or "DefaultCPUAllocator: can't allocate memory" in text:
        fix = "lower data.microbatch_tokens or engine.max_batch_size, or recompute activations"
        return MachineError("machine-memory", f"out of memory: {text}", "this process", fix)
    return None


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
