"""The rules of the house, held by machine: sizes, imports, the list of keys, what the wheel holds."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from onroute.cli.catalogs import CATALOGS
from onroute.core.config.keys import slots_of
from onroute.core.config.sections import RunConfig

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "onroute"
MODULES = sorted(SOURCE.rglob("*.py"))
PYTHON_FILES = [*MODULES, *sorted((ROOT / "tests").rglob("*.py"))]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_SECTION_KEYS = 15
MAX_KEYS = 150

LONGER_FOR_A_REASON: dict[str, str] = {}
"""`path` or `path:function` of what exceeds its budget, with the reason."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def long_functions(path: Path) -> list[str]:
    return [
        f"{name_of(path)}:{node.name}"
        for node in nodes(path)
        if isinstance(node, Function) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def test_files_and_functions_keep_their_budget():
    found = [
        name_of(path) for path in PYTHON_FILES if len(path.read_text("utf-8").splitlines()) > MAX_FILE_LINES
    ]
    found += [function for path in PYTHON_FILES for function in long_functions(path)]
    assert sorted(found) == sorted(LONGER_FOR_A_REASON)


def test_the_keys_of_a_run_file_are_those_we_agreed_on():
    keys = [
        f"{name}.{field.name}" for name, cls in get_type_hints(RunConfig).items() for field in fields(cls)
    ]
    assert keys == (ROOT / "tests/core/config_keys.txt").read_text(encoding="utf-8").split()


def test_no_section_and_no_options_class_has_more_keys_than_a_page_holds():
    sections = list(get_type_hints(RunConfig).values())
    options = [
        entry.options
        for _, entries in slots_of(CATALOGS)
        for entry in entries.values()
        if entry.options is not None
    ]
    assert max(len(fields(cls)) for cls in [*sections, *options]) <= MAX_SECTION_KEYS
    assert sum(len(fields(cls)) for cls in sections) <= MAX_KEYS


def test_an_optional_option_defaults_to_none_so_that_a_resolved_file_can_leave_it_out():
    for _, entries in slots_of(CATALOGS):
        for entry in entries.values():
            for name, hint in get_type_hints(entry.options).items() if entry.options else ():
                if type(None) in getattr(hint, "__args__", ()):
                    default = {field.name: field.default for field in fields(entry.options)}[name]
                    assert default is None, f"{entry.name}: {name}"


def test_init_files_import_nothing():
    for path in SOURCE.rglob("__init__.py"):
        imports = [
            node
            for node in nodes(path)
            if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__"
        ]
        assert imports == [], name_of(path)


def test_importing_the_package_imports_no_torch():
    script = "import sys, onroute, onroute.core; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_only_commands_and_observability_print():
    prints = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        if path.relative_to(SOURCE).parts[0] not in ("cli", "observability") and path.name != "__main__.py"
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert prints == []


def test_no_environment_variable_is_a_switch():
    """Only the variables by which a launcher tells a process its place are read."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    readers = ("os.environ", "environ", "os.environ.get", "environ.get", "os.getenv", "getenv")
    read = [
        f"{name_of(path)}: {ast.unparse(node)}"
        for path in MODULES
        for node in nodes(path)
        if (isinstance(node, ast.Subscript) and ast.unparse(node.value) in readers)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in readers)
    ]
    assert [line for line in read if not any(f"'{name}'" in line for name in launcher)] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy, so that nothing of an earlier build gets in and nothing is left behind.
    folder = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "copy" / "src", ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "copy")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    command.append(str(folder / "copy"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = folder.glob("*.whl")
    return file


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_its_licence(wheel):
    listing = ["git", "-C", str(ROOT), "ls-files", "src/onroute"]
    tracked = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    names = zipfile.ZipFile(wheel).namelist()
    assert [path for path in tracked if path.removeprefix("src/") not in names] == []
    assert "onroute/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_wheel_imports_in_an_environment_without_its_dependencies(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    script = (
        "import importlib.resources, onroute, onroute.core.errors, onroute.core.seeds\n"
        "import onroute.core.config.catalog, onroute.core.sampling\n"
        "print((importlib.resources.files(onroute) / 'py.typed').is_file(), onroute.__file__)\n"
    )
    done = subprocess.run(
        [str(python), "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    typed, file = done.stdout.split()
    assert typed == "True"
    assert Path(file).is_relative_to(tmp_path)
