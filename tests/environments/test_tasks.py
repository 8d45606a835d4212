from __future__ import annotations

import subprocess
import sys

import pytest

from onroute.core.errors import UserError
from onroute.environments.tasks import PAGE_SIZE, load_task, task_names, task_parameters


def test_a_problem_depends_on_seed_stream_and_number_alone():
    first, again = load_task("basic_arithmetic", {}, 5), load_task("basic_arithmetic", {}, 5)
    again.problem("train", 3)
    assert first.problem("train", 700) == again.problem("train", 700)
    questions = {
        load_task("basic_arithmetic", {}, seed).problem(stream, number).question
        for seed, stream, number in [(5, "train", 7), (6, "train", 7), (5, "held_out", 7), (5, "train", 8)]
    }
    assert len(questions) == 4


@pytest.mark.parametrize("task", ["acre", "list_functions", "gsm_symbolic", "word_ladder"])
def test_tasks_that_draw_their_whole_data_set_when_built_have_no_last_problem(task):
    assert load_task(task, {}, 0).problem("train", 3 * PAGE_SIZE + 1).question


def test_an_unknown_task_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match=r"environment-unknown-task.*'number_sort'.*number_sorting"):
        load_task("number_sort", {}, 0)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("no_such_task", "`onroute config --tasks` lists its tasks"),
        ("sorting", "did you mean number_sorting or word_sorting?"),
        ("sudokku", "did you mean sudoku"),
    ],
)
def test_only_names_that_are_close_are_suggested_and_else_where_they_are_listed(name, fix):
    with pytest.raises(UserError) as raised:
        load_task(name, {}, 0)
    assert raised.value.fix.startswith(fix)
    assert "products" not in raised.value.fix


def test_tasks_and_their_parameters_are_told_without_those_that_the_run_sets():
    assert {"number_sorting", "spell_backward", "sudoku"} <= set(task_names())
    assert task_parameters("number_sorting") == {
        "min_numbers": 3,
        "max_numbers": 10,
        "min_decimals": 0,
        "max_decimals": 2,
        "min_value": -100.0,
        "max_value": 100.0,
    }


def test_the_parameters_of_every_task_can_be_told():
    assert all(isinstance(task_parameters(name), dict) for name in task_names())


def test_a_parameter_that_is_close_to_none_is_refused_with_all_of_them():
    with pytest.raises(UserError, match=r"it takes min_numbers, max_numbers, min_decimals"):
        load_task("number_sorting", {"difficulty": 3}, 0)


def test_an_unknown_parameter_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"environment-unknown-parameter.*min_number'.*min_numbers"):
        load_task("number_sorting", {"min_number": 3}, 0)


@pytest.mark.parametrize("key", ["seed", "size"])
def test_parameters_that_the_run_sets_are_refused(key):
    with pytest.raises(UserError, match="environment-reserved-parameter"):
        load_task("number_sorting", {key: 3}, 0)


def test_a_bad_value_is_refused_with_the_reason_of_the_library():
    with pytest.raises(UserError, match=r"environment-bad-parameters.*max_numbers must be >= min_numbers"):
        load_task("number_sorting", {"min_numbers": 9, "max_numbers": 2}, 0)


def test_a_value_of_the_wrong_type_is_refused():
    with pytest.raises(UserError, match="environment-bad-parameters"):
        load_task("number_sorting", {"min_numbers": "many"}, 0)


def test_a_missing_library_is_refused_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"environment-missing-package.*onroute\[tasks\]"):
        load_task("number_sorting", {}, 0)


def test_the_first_import_prints_no_syntax_warning(tmp_path):
    code = "from onroute.environments.tasks import load_task; load_task('number_sorting', {}, 0)"
    # A fresh bytecode folder makes Python compile the dependencies again, which is when it warns.
    out = subprocess.run(
        [sys.executable, "-X", f"pycache_prefix={tmp_path}", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Warning" not in out.stderr
