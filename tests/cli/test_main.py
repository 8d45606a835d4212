from __future__ import annotations

import importlib.metadata
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_config import onroute

COMMANDS = ["demo", "train", "check", "compare", "export", "config"]
WAITING_RUN = """
import asyncio
from pathlib import Path
from onroute.cli import main
from onroute.cli.failures import guarded

async def wait():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    finally:
        print("checkpoint written", flush=True)

@main.app.command()
@guarded
def wait_long():
    asyncio.run(wait())

main.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_ends_a_run_in_order_with_code_130(tmp_path: Path, number: signal.Signals, ignored: bool):
    script = tmp_path / "run.py"
    script.write_text(WAITING_RUN, encoding="utf-8")
    ignore = 'trap "" INT; ' if ignored else ""
    shell = f"{ignore}exec '{sys.executable}' '{script}' wait-long"
    process = subprocess.Popen(
        ["sh", "-c", shell], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert out == "checkpoint written\n"
    assert err.startswith("interrupted; ")
    assert err.count("\n") == 1
    assert process.returncode == 130


def test_onroute_alone_prints_its_help_and_is_no_mistake():
    alone, asked = onroute(), onroute("--help")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout == asked.stdout
    assert "python -m onroute.training" in alone.stdout
    assert all(f"\n  {command} " in alone.stdout for command in COMMANDS)


def test_the_version_is_that_of_the_package():
    assert onroute("--version").stdout == f"onroute {importlib.metadata.version('onroute')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example_on_a_line_of_its_own_and_no_types_of_python(command):
    done = onroute(command, "--help")
    assert done.returncode == 0
    assert f"\n\n  Example: onroute {command}" in done.stdout
    assert [word for word in ("<", "list[", "bool", "None") if word in done.stdout] == []
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_arguments_stand_in_the_help_as_in_the_usage_line():
    lines = onroute("train", "--help").stdout.splitlines()
    assert lines[0] == "Usage: onroute train [OPTIONS] {RUN.TOML} [--SECTION.KEY=VALUE]..."
    assert any(line.startswith("  RUN.TOML  ") for line in lines)
    assert any(
        line.startswith("  --SECTION.KEY=VALUE  Override a key of the file, e.g. --optimizer.lr=1e-6")
        for line in lines
    )
