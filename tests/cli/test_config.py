from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib

import pytest

from onroute.cli.catalogs import CATALOGS
from onroute.core.config.describe import describe


def onroute(*args: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from onroute.cli.main import main; main()", *args]
    environment = os.environ | {"COLUMNS": str(columns)}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def test_json_is_one_line_with_every_key():
    done = onroute("config", "--json")
    assert done.returncode == 0
    [line] = done.stdout.splitlines()
    lines = json.loads(line)
    assert len(lines) == len(describe(CATALOGS)) > 60
    assert set(lines[0]) == {"key", "type", "default", "meaning"}
    assert lines[0]["key"] == "model.path"


def test_json_of_a_section_holds_its_keys_and_those_of_its_variants():
    [line] = onroute("config", "algorithm", "--json").stdout.splitlines()
    keys = [key["key"] for key in json.loads(line)]
    assert {key.partition(".")[0] for key in keys} == {"algorithm"}
    assert "algorithm.loss_options.clip_low" in keys


def test_people_get_every_key_whole_within_the_width_of_the_terminal():
    done = onroute("config")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    table, keys = "", []
    for line in lines:
        if line.startswith("["):
            table = line[1 : line.index("]")]
        elif line and not line.startswith(" ") and " =" in line:
            keys.append(f"{table}.{line.partition(' =')[0]}")
    assert keys == [key.key for key in describe(CATALOGS)]


def test_a_section_is_shown_alone_with_the_keys_of_its_variants():
    done = onroute("config", "environment")
    headings = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert headings == ["[environment]", '[environment.options]  # with environment.name = "reasoning_gym"']


@pytest.mark.parametrize("name", ["optimiser", "optimizer.lr", "[optimizer]"])
def test_an_unknown_section_is_one_line_with_the_nearest(name):
    done = onroute("config", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"[config-unknown-section] there is no section {name}; command line; did you mean optimizer?\n"
    )


def test_the_tasks_are_listed_and_one_is_shown_with_its_parameters_as_a_run_file_takes_them():
    names = onroute("config", "--tasks").stdout
    assert "number_sorting, " in names
    assert max(map(len, names.splitlines())) <= 80
    head, _, problem = onroute("config", "number_sorting", "--tasks").stdout.partition("\nThe first problem")
    options = tomllib.loads(head)["environment"]["options"]
    assert options["task"] == "number_sorting"
    assert options["parameters"]["max_value"] == 100.0
    assert "Sort these numbers" in problem


@pytest.mark.parametrize(
    ("task", "shows"),
    [
        ("composite", "These alone make no problem: "),  # no default for what it is made of
        ("time_intervals", 'min_date = "1900-01-01"'),  # a date of Python
        ("figlet_font", "#static_word =  # not set by default"),
    ],
)
def test_defaults_that_no_run_file_could_hold_are_shown_all_the_same(task, shows):
    done = onroute("config", "--tasks", task)
    assert (done.returncode, done.stderr) == (0, "")
    assert shows in done.stdout
    tomllib.loads(done.stdout.partition("\n\nTh")[0])


def test_the_parameters_of_a_task_are_json_even_where_its_defaults_are_dates():
    parameters = json.loads(onroute("config", "--tasks", "time_intervals", "--json").stdout)
    assert parameters["min_date"] == "1900-01-01"


def test_an_unknown_task_is_one_line():
    done = onroute("config", "--tasks", "number_sort")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.endswith("did you mean number_sorting?")


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
