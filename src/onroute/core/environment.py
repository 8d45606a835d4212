"""What gives prompts and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from onroute.core.engine import Sampler
from onroute.core.samples import Group, Prompt, Split, Tokens
from onroute.core.sampling import SamplingParams


class TextCodec(Protocol):
    """Text to ids and back. Ids that were sampled are never decoded and encoded again."""

    def encode(self, text: str) -> Tokens: ...

    def decode(self, tokens: Sequence[int] | Tokens) -> str: ...


class Environment(Protocol):
    """Prompts by index, and rollouts of them.

    `prompt("train", i)` is defined for every i >= 0 and never equals a held-out prompt;
    `prompt("held_out", i)` for 0 <= i < the number of held-out problems the run asks for.
    """

    def prompt(self, split: Split, index: int) -> Prompt: ...

    async def rollout(
        self, prompt: Prompt, sampler: Sampler, *, n: int, sampling: SamplingParams, seed: int
    ) -> Group:
        """`n` scored samples of one prompt; sample i draws from `seed_for(seed, i)`."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that also knows a right answer, for a supervised phase before RL."""

    def demonstration(self, prompt: Prompt) -> Tokens:
        """The response ids of a right answer, the stop token included."""
        ...
