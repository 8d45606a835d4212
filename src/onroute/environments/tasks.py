"""The reasoning-gym library behind three calls: load a task, draw a problem, score an answer."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from onroute.core.errors import CheckError, UserError
from onroute.core.samples import Json
from onroute.core.seeds import seed_for

PAGE_SIZE = 500
"""Problems drawn from one data set of the library. Some tasks draw all of them when they are built
and refuse an index past the end, so an endless stream is made of many data sets of this size."""

_SET_BY_THE_RUN = ("seed", "size")
_SHORTEST_PART = 4
_MOST_SUGGESTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem as the library gives it.

    answer: a right answer in the library's own form; None where a task only checks answers.
    entry: the library's record, which scoring needs whole.
    """

    question: str
    answer: str | None
    entry: Mapping[str, Any]

    @property
    def details(self) -> Mapping[str, Any]:
        """What the task tells about the problem beside its text."""
        details: Mapping[str, Any] = self.entry["metadata"]
        return details


class Task:
    """One task with its parameters: endless named streams of problems, each reproducible by
    (seed, stream, number)."""

    def __init__(self, name: str, parameters: Mapping[str, Json], library: Any, seed: int) -> None:
        self.name = name
        self._library = library
        self._parameters = dict(parameters)
        self._seed = seed
        self._page = functools.lru_cache(maxsize=8)(self._build_page)

    @functools.cached_property
    def config(self) -> Any:
        """The library's configuration record, its defaults filled in."""
        return self._page("train", 0).config

    def problem(self, stream: str, number: int) -> Problem:
        """Problem `number` (>= 0) of a stream.

        Raises `CheckError` when the library fails to draw it."""
        page, index = divmod(number, PAGE_SIZE)
        try:
            entry = self._page(stream, page)[index]
        except Exception as error:
            raise CheckError(
                "environment-problem",
                f"reasoning-gym could not draw a problem: {_reason(error)}",
                f"task {self.name}, problem {stream}/{number}",
                "change the parameters of the task, or leave this task out",
            ) from error
        return Problem(question=str(entry["question"]), answer=entry["answer"], entry=entry)

    def score(self, answer: str, problem: Problem) -> float:
        """The library's score of an answer. What it raises is passed on."""
        return float(self._page("train", 0).score_answer(answer, problem.entry))

    def _build_page(self, stream: str, page: int) -> Any:
        seed = seed_for(self._seed, "reasoning_gym", self.name, stream, page) % 2**31
        return self._library.create_dataset(self.name, **self._parameters, seed=seed, size=PAGE_SIZE)


def load_task(name: str, parameters: Mapping[str, Json], seed: int) -> Task:
    """The task `name` with `parameters`, checked by drawing its first problem.

    Raises `UserError` when the library is not installed, has no such task, or refuses the parameters.
    """
    library = _import_library()
    _check_keys(name, parameters, list(_parameters(library, name)))
    task = Task(name, parameters, library, seed)
    try:
        task.problem("train", 0)
    except CheckError as error:
        raise UserError(
            "environment-bad-parameters",
            f"reasoning-gym refuses the parameters: {_reason(error.__cause__)}",
            f"environment.options.parameters of task {name}",
            "change the value that the reason names",
        ) from error
    return task


def task_names() -> list[str]:
    """The tasks of the library. Raises `UserError` when it is not installed."""
    return sorted(_import_library().factory.DATASETS)


def task_parameters(name: str) -> dict[str, object]:
    """The parameters of a task with the library's defaults. Raises `UserError` when there is no such task."""
    return _parameters(_import_library(), name)


def _parameters(library: Any, name: str) -> dict[str, object]:
    known: Mapping[str, Any] = library.factory.DATASETS
    if name not in known:
        raise UserError(
            "environment-unknown-task",
            f"reasoning-gym has no task {name!r}",
            "environment.options.task",
            _did_you_mean(name, known, "`onroute config --tasks` lists its tasks"),
        )
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(known[name][1])
        if field.name not in _SET_BY_THE_RUN
    }


def _import_library() -> Any:
    try:
        with warnings.catch_warnings():
            # Dependencies of the library hold strings with invalid escapes.
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UserError(
            "environment-missing-package",
            f"reasoning-gym cannot be imported: {_reason(error)}",
            "environment.name = reasoning_gym",
            'install it: pip install "onroute[tasks]"',
        ) from error


def _check_keys(task: str, parameters: Mapping[str, Json], allowed: list[str]) -> None:
    for key in parameters:
        where = f"environment.options.parameters.{key} of task {task}"
        if key in _SET_BY_THE_RUN:
            raise UserError(
                "environment-reserved-parameter",
                f"parameter {key!r} is set by the run",
                where,
                "remove it; run.seed decides which problems are drawn, and there is no end of them",
            )
        if key not in allowed:
            raise UserError(
                "environment-unknown-parameter",
                f"task {task} has no parameter {key!r}",
                where,
                _did_you_mean(key, allowed, f"it takes {', '.join(allowed) or 'none'}"),
            )


def _did_you_mean(name: str, known: Collection[str], otherwise: str) -> str:
    """The names that `name` is a misspelling or a part of, if any."""
    whole = [other for other in sorted(known) if len(name) >= _SHORTEST_PART and name in other]
    close = whole or difflib.get_close_matches(name, known, n=_MOST_SUGGESTED, cutoff=0.75)
    return f"did you mean {' or '.join(close[:_MOST_SUGGESTED])}?" if close else otherwise


def _reason(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
