"""Training prompts in order, from where the last run stopped."""

from __future__ import annotations

from dataclasses import dataclass

from onroute.core.environment import Environment
from onroute.core.errors import CheckError, UserError
from onroute.core.samples import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """All that a checkpoint needs of a `PromptStream`: prompts of `seed` up to `cursor` were taken."""

    seed: int
    cursor: int


class PromptStream:
    """Consecutive training prompts of an environment; none comes twice, also over a resume.

    `seed` is the one that the environment draws its prompts from.
    """

    def __init__(self, environment: Environment, *, seed: int, cursor: int = 0) -> None:
        self._environment = environment
        self._seed = seed
        self._cursor = cursor

    @classmethod
    def resume(cls, environment: Environment, *, seed: int, state: StreamState) -> PromptStream:
        """Go on after `state`.

        Raises:
            UserError: the state is of another seed, so its cursor counts other prompts.
        """
        if state.seed != seed:
            raise UserError(
                "data-stream-seed",
                f"the run has seed {seed}, its checkpoint {state.seed}",
                f"prompt stream at prompt {state.cursor}",
                f"set run.seed = {state.seed}, or start a new run",
            )
        return cls(environment, seed=seed, cursor=state.cursor)

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts.

        Raises:
            CheckError: two of them have one id; their samples would be taken for one group.
        """
        prompts = [self._environment.prompt("train", self._cursor + i) for i in range(n)]
        first: dict[str, int] = {}
        for index, prompt in enumerate(prompts, start=self._cursor):
            if prompt.id in first:
                raise CheckError(
                    "data-prompt-id",
                    f"training prompts {first[prompt.id]} and {index} share an id",
                    f"prompt {prompt.id}",
                    "make the environment give every prompt its own id",
                )
            first[prompt.id] = index
        self._cursor += n
        return prompts

    def state(self) -> StreamState:
        return StreamState(seed=self._seed, cursor=self._cursor)
