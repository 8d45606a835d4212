"""Ray stays in its room, and nothing blocks the loop of an actor."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import onroute

SOURCE = Path(onroute.__file__).parent
BLOCKING = ("ray.get", "ray.wait", "time.sleep", "subprocess.run", "urllib.request.urlopen")


def test_nothing_blocks_inside_a_coroutine():
    found = [
        f"{path.relative_to(SOURCE)}:{call.lineno}"
        for path in SOURCE.rglob("*.py")
        for outer in ast.walk(ast.parse(path.read_text()))
        if isinstance(outer, ast.AsyncFunctionDef)
        for call in ast.walk(outer)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in BLOCKING
    ]
    assert found == []


def test_only_its_room_imports_ray():
    importers = {
        path.relative_to(SOURCE).parts[:2]
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(name.name.split(".")[0] == "ray" for name in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray")
    }
    assert importers == {("orchestration", "ray")}


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from pathlib import Path
from onroute.cli.catalogs import CATALOGS
from onroute.core.config.load import load_config
from onroute.observability.progress import Progress
from onroute.orchestration.run import execute
config = load_config(Path(sys.argv[1]), sys.argv[2:], CATALOGS)
print(execute(config, progress=Progress.silent()).run)
"""


@pytest.mark.parametrize("place", ["local", "ray"])
def test_without_ray_a_local_run_works_and_one_on_ray_says_what_to_install(small_run, tmp_path, place):
    from onroute.core.config.load import dump_toml

    config = small_run("--run.steps=2", "--run.supervised_steps=0", "--run.eval_prompts=0")
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    command = [sys.executable, "-c", WITHOUT_RAY, str(file), f"--run.on={place}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if place == "local":
        assert done.stdout.strip() == config.run.folder, done.stderr
    else:
        assert "[run-no-ray] the package ray is not installed" in done.stderr
        assert "onroute[ray]" in done.stderr
        assert not Path(config.run.folder).exists()
