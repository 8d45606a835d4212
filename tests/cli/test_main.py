from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
