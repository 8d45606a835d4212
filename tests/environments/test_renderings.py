from __future__ import annotations

import pytest

from onroute.core.errors import UserError
from onroute.environments.renderings import CompactSorting, CompactSpelling, Plain, rendering_for
from onroute.environments.tasks import Problem, load_task

SINGLE_DIGITS = {
    "min_numbers": 5,
    "max_numbers": 5,
    "min_decimals": 0,
    "max_decimals": 0,
    "min_value": -0.49,
    "max_value": 9.49,
}


def sorting_problem(direction: str) -> Problem:
    ascending = ["-0.0", "1.0", "3.0", "5.0", "9.0"]
    in_order = ascending if direction == "ascending" else ascending[::-1]
    entry = {
        "answer": str(in_order),
        "metadata": {
            "original_numbers": ["5.0", "-0.0", "9.0", "1.0", "3.0"],
            "direction": direction,
            "sorted_numbers": in_order,
        },
    }
    return Problem(question="", answer=str(in_order), entry=entry)


def test_compact_sorting_shows_direction_and_digits_and_minus_zero_is_0():
    rendering = CompactSorting(load_task("number_sorting", SINGLE_DIGITS, 0))
    assert rendering.prompt(sorting_problem("ascending")) == "^a50913="
    assert rendering.answer(sorting_problem("ascending")) == "01359"
    assert rendering.prompt(sorting_problem("descending")) == "^d50913="
    assert rendering.answer(sorting_problem("descending")) == "95310"


def test_every_drawn_value_is_one_digit():
    task = load_task("number_sorting", SINGLE_DIGITS, 0)
    rendering = CompactSorting(task)
    prompts = [rendering.prompt(task.problem("train", i)) for i in range(400)]
    assert {len(prompt) for prompt in prompts} == {8}  # ^ a 5 digits =
    assert {c for prompt in prompts for c in prompt[2:7]} == set("0123456789")
    assert any("-0.0" in task.problem("train", i).details["original_numbers"] for i in range(400))


def test_a_near_miss_that_the_library_pays_in_full_earns_nothing():
    task = load_task("number_sorting", SINGLE_DIGITS, 0)
    problem = sorting_problem("ascending")  # 0 1 3 5 9
    assert task.score("['0', '1', '3', '5', '8']", problem) == 1.0  # the library forgives 1 a number
    assert CompactSorting(task).score("01358", problem) == 0.0
    assert CompactSorting(task).score("01359", problem) == 1.0


@pytest.mark.parametrize("response", ["", "0135", "013599", " 01359", "01359\n", "01359$", "95310"])
def test_anything_but_the_right_digits_earns_nothing(response):
    rendering = CompactSorting(load_task("number_sorting", SINGLE_DIGITS, 0))
    assert rendering.score(response, sorting_problem("ascending")) == 0.0


@pytest.mark.parametrize(
    "change", [{"max_decimals": 1}, {"max_value": 9.5}, {"min_value": -0.6}, {"max_value": 100.0}]
)
def test_compact_sorting_refuses_parameters_beyond_single_digits(change):
    with pytest.raises(UserError, match="environment-compact-digits"):
        rendering_for("compact", load_task("number_sorting", SINGLE_DIGITS | change, 0))


def test_the_refusal_names_bounds_that_are_taken_and_those_that_make_digits_equally_likely():
    with pytest.raises(UserError, match=r"-0\.49 and 9\.49") as raised:
        rendering_for("compact", load_task("number_sorting", SINGLE_DIGITS | {"max_value": 10.0}, 0))
    assert "min_value = 0, max_value = 9" in raised.value.fix
    rounded_bounds = SINGLE_DIGITS | {"min_value": 0, "max_value": 9}

    def share_of_edges(parameters):
        task = load_task("number_sorting", parameters, 0)
        rendering = rendering_for("compact", task)
        digits = "".join(rendering.prompt(task.problem("train", i))[2:7] for i in range(400))
        return (digits.count("0") + digits.count("9")) / len(digits)

    assert share_of_edges(rounded_bounds) == pytest.approx(1 / 9, abs=0.027)  # two halves of 9 intervals
    assert share_of_edges(SINGLE_DIGITS) == pytest.approx(2 / 10, abs=0.027)  # 2000 digits: 3 s.e.


def test_compact_spelling_pays_the_whole_word_only():
    task = load_task("spell_backward", {"min_word_len": 3, "max_word_len": 5}, 0)
    rendering = CompactSpelling(task)
    problem = Problem(question="", answer="cba", entry={"answer": "cba", "metadata": {"word": "abc"}})
    assert rendering.prompt(problem) == "^abc="
    assert rendering.answer(problem) == "cba"
    assert rendering.score("cba", problem) == 1.0
    assert task.score("cbx", problem) == pytest.approx(2 / 3)  # the library pays two letters of three
    assert rendering.score("cbx", problem) == 0.0


def test_a_task_without_compact_form_is_refused_with_those_that_have_one():
    with pytest.raises(UserError, match=r"basic_arithmetic has no compact.*sorting and spell_backward"):
        rendering_for("compact", load_task("basic_arithmetic", {}, 0))


def test_plain_asks_in_the_words_of_the_library_and_scores_with_it():
    task = load_task("basic_arithmetic", {}, 0)
    rendering = rendering_for("plain", task)
    problem = task.problem("train", 0)
    assert rendering.prompt(problem) == problem.question + "\n"
    assert rendering.score(f" {rendering.answer(problem)}\n", problem) == 1.0
    assert rendering.score("no idea", problem) == 0.0


def test_a_task_that_tells_no_answer_gives_prompts_but_no_demonstration():
    task = load_task("graph_color", {}, 0)
    with pytest.raises(UserError, match="environment-no-demonstration"):
        Plain(task).answer(task.problem("train", 0))
