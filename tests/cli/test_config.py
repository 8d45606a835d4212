from __future__ import annotations

import json
import subprocess
import sys
import time

from onroute.cli.catalogs import CATALOGS
from onroute.core.config.describe import describe


def onroute(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from onroute.cli.main import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_json_is_one_line_with_every_key():
    done = onroute("config", "--json")
    assert done.returncode == 0
    [line] = done.stdout.splitlines()
    lines = json.loads(line)
    assert len(lines) == len(describe(CATALOGS)) > 60
    assert set(lines[0]) == {"key", "type", "default", "meaning"}
    assert lines[0]["key"] == "model.path"


def test_people_get_a_table_with_every_key():
    done = onroute("config")
    assert done.returncode == 0
    assert "Keys of a run file" in done.stdout
    assert "model.path" in done.stdout


def test_help_comes_at_once_and_needs_no_torch():
    start = time.perf_counter()
    done = onroute("--help")
    assert time.perf_counter() - start < 5  # 0.3 s on a free core; torch alone takes longer on a busy one
    assert done.returncode == 0
    script = "import sys, onroute.cli.main; print(sorted({'torch', 'pydantic', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_an_unknown_flag_ends_with_the_exit_code_of_a_users_mistake():
    done = onroute("config", "--jsn")
    assert done.returncode == 2
    assert "--json" in done.stderr
