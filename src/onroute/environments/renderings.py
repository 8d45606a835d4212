"""How a problem becomes prompt text, and how a response is scored."""

from __future__ import annotations

from typing import Literal, Protocol

from onroute.core.errors import UserError
from onroute.environments.tasks import Problem, Task


class Rendering(Protocol):
    """Text form of one task. A response is the completion without its stop token."""

    def prompt(self, problem: Problem) -> str: ...

    def answer(self, problem: Problem) -> str:
        """The text of a right response. Raises `UserError` when the task does not tell one."""
        ...

    def score(self, response: str, problem: Problem) -> float: ...


class Plain:
    """Question, newline, answer, all as the library words them; the score is the library's own."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def prompt(self, problem: Problem) -> str:
        return problem.question + "\n"

    def answer(self, problem: Problem) -> str:
        if problem.answer is None:
            raise UserError(
                "environment-no-demonstration",
                f"task {self._task.name} checks answers but tells none",
                "a supervised phase needs right answers",
                "set run.supervised_steps = 0, or choose another task",
            )
        return problem.answer

    def score(self, response: str, problem: Problem) -> float:
        return self._task.score(response.strip(), problem)


class CompactSorting:
    """number_sorting in single digits: `^a52913=` asks for ascending order, `12359` answers;
    `^d52913=` asks for descending order, `95321` answers.

    The library forgives an error of 1 in every number, which is a whole digit here, so that wrong
    answers would be paid. A response earns 1 when it is the right one to the digit, else 0.
    """

    def __init__(self, task: Task) -> None:
        config = task.config
        if config.max_decimals != 0 or config.min_value < -0.5 or config.max_value >= 9.5:
            raise UserError(
                "environment-compact-digits",
                f"compact number_sorting needs whole numbers 0 to 9, not {config.min_value:g} to "
                f"{config.max_value:g} with up to {config.max_decimals} decimals",
                "environment.options.parameters",
                "set min_decimals = max_decimals = 0 and min_value = 0, max_value = 9, or rather -0.49 and "
                "9.49: values are rounded, and with 0 and 9 these two digits come half as often as others",
            )
        self._task = task

    def prompt(self, problem: Problem) -> str:
        numbers: list[str] = problem.details["original_numbers"]
        direction: str = problem.details["direction"]
        return f"^{direction[0]}{_digits(numbers)}="

    def answer(self, problem: Problem) -> str:
        return _digits(problem.details["sorted_numbers"])

    def score(self, response: str, problem: Problem) -> float:
        if response != self.answer(problem):
            return 0.0
        as_list = str([*response])
        return float(self._task.score(as_list, problem) == 1.0)


class CompactSpelling:
    """spell_backward in single letters: `^abc=` asks, `cba` answers.

    The library pays a share for every letter in place; here only the whole word earns 1.
    """

    def __init__(self, task: Task) -> None:
        self._task = task

    def prompt(self, problem: Problem) -> str:
        return f"^{problem.details['word']}="

    def answer(self, problem: Problem) -> str:
        word: str = problem.details["word"]
        return word[::-1]

    def score(self, response: str, problem: Problem) -> float:
        return float(response == self.answer(problem) and self._task.score(response, problem) == 1.0)


_COMPACT: dict[str, type[CompactSorting] | type[CompactSpelling]] = {
    "number_sorting": CompactSorting,
    "spell_backward": CompactSpelling,
}


def rendering_for(name: Literal["plain", "compact"], task: Task) -> Rendering:
    """The rendering `name` of a task.

    Raises `UserError` when the task, or its parameters, have no compact form."""
    if name == "plain":
        return Plain(task)
    if task.name not in _COMPACT:
        raise UserError(
            "environment-no-compact-rendering",
            f"task {task.name} has no compact rendering; {' and '.join(sorted(_COMPACT))} have one",
            "environment.options.rendering",
            "set rendering = plain, or choose one of those tasks",
        )
    return _COMPACT[task.name](task)


def _digits(numbers: list[str]) -> str:
    # The library rounds values just below zero to "-0.0", which is the digit 0.
    return "".join(str(abs(round(float(number)))) for number in numbers)
