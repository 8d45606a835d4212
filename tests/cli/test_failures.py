from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer

from onroute.cli.failures import guarded, tracebacks_in
from onroute.core.errors import CheckError, MachineError, OnrouteError, UserError


def ending(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and stderr of a command that raises `error`."""

    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as raised:
        guarded(command)()
    return raised.value.exit_code, capsys.readouterr().err


@pytest.mark.parametrize("kind", [UserError, CheckError, MachineError])
def test_an_error_of_ours_is_its_line_and_its_code(kind: Callable[..., OnrouteError], capsys):
    error = kind("a-code", "what", "where", "fix")
    assert ending(error, capsys) == (error.exit_code, "[a-code] what; where; fix\n")


def test_an_error_of_ours_is_found_in_a_group_of_tasks(capsys):
    inner = ExceptionGroup("inner", [ValueError("x"), CheckError("a-code", "what", "where", "fix")])
    assert ending(ExceptionGroup("outer", [inner]), capsys) == (3, "[a-code] what; where; fix\n")


def test_ctrl_c_is_code_130(capsys):
    code, line = ending(KeyboardInterrupt(), capsys)
    assert code == 130
    assert line.startswith("interrupted; ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "machine-memory"),
        (MemoryError(), "machine-memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            "machine-memory",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a/model"), "machine-disk"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "machine-disk"),
    ],
)
def test_a_machine_that_ran_out_of_something_is_one_line_and_code_4(error, code, capsys):
    exit_code, line = ending(error, capsys)
    assert exit_code == 4
    assert line.startswith(f"[{code}] ")
    assert line.count("\n") == 1


def test_any_other_error_is_one_line_that_names_the_file_of_its_traceback(tmp_path, capsys):
    def command() -> None:
        with tracebacks_in(tmp_path):
            raise ZeroDivisionError("first line\nsecond line")

    with pytest.raises(typer.Exit) as raised:
        guarded(command)()
    assert raised.value.exit_code == 1
    file = tmp_path / "traceback.txt"
    line = capsys.readouterr().err
    assert line.startswith(f"[unexpected] ZeroDivisionError: first line; traceback in {file}; ")
    assert line.count("\n") == 1
    assert "second line" in file.read_text()


def test_without_a_run_folder_the_traceback_goes_to_a_temporary_file(capsys):
    code, line = ending(ValueError("odd"), capsys)
    file = Path(line.partition("traceback in ")[2].partition(";")[0])
    assert code == 1
    assert "ValueError: odd" in file.read_text()
    file.unlink()


def test_a_command_keeps_the_signature_that_typer_reads():
    def command(name: str) -> None:
        """Says hello."""

    assert guarded(command).__doc__ == "Says hello."
    assert guarded(command).__wrapped__ is command
