"""What goes into a rollout and what comes out of it. Arrays are numpy, at rest on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onroute.core.routing import RoutingTrace
from onroute.core.sampling import SamplingParams

Json: TypeAlias = "str | int | float | bool | None | list[Json] | dict[str, Json]"
Tokens: TypeAlias = NDArray[np.int32]
Split: TypeAlias = Literal["train", "held_out"]
StopReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, tokenised once.

    `id` is unique within the environment and stable across runs; samples of one prompt form a group.
    """

    id: str
    tokens: Tokens
    text: str
    metadata: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One completion asked of an engine. `seed` fixes the sampled tokens, whatever else is in the batch."""

    id: str
    prompt_tokens: Tokens
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine answers.

    tokens: [num_new] sampled ids, the stop token included.
    log_probs: [num_new] natural log of the tempered probability of each, see `SamplingParams`.
    routing: covers prompt and new tokens, or None when the engine does not capture.
    weight_versions: [num_new] int32, the version of the weights that sampled each token.
    """

    id: str
    tokens: Tokens
    log_probs: NDArray[np.float32]
    routing: RoutingTrace | None
    stop_reason: StopReason
    weight_versions: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory, ready to be trained on. Every array but `routing` has one entry per token.

    tokens: [T] prompt and response.
    prompt_length: P; tokens[:P] came from the environment.
    loss_mask: [T] bool, True where the policy produced the token.
    log_probs: [T] float32 of the engine, 0.0 where the policy did not produce the token.
    weight_versions: [T] int32, -1 where the policy did not produce the token.
    routing: rows for all T tokens, or None.

    Prompt "2+2=" (4 tokens) and response "4$": tokens [6], loss_mask [0, 0, 0, 0, 1, 1].
    """

    id: str
    prompt_id: str
    tokens: Tokens
    prompt_length: int
    loss_mask: NDArray[np.bool_]
    log_probs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    routing: RoutingTrace | None
    reward: float
    stop_reason: StopReason

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """What is known of a sample without its arrays: all that a driver needs to plan and to report."""

    id: str
    prompt_id: str
    num_tokens: int
    prompt_length: int
    loss_tokens: int
    reward: float
    stop_reason: StopReason
    token_bytes: int
    route_bytes: int

    @classmethod
    def of(cls, sample: Sample) -> SampleFacts:
        arrays = (sample.tokens, sample.loss_mask, sample.log_probs, sample.weight_versions)
        return cls(
            id=sample.id,
            prompt_id=sample.prompt_id,
            num_tokens=sample.num_tokens,
            prompt_length=sample.prompt_length,
            loss_tokens=int(sample.loss_mask.sum()),
            reward=sample.reward,
            stop_reason=sample.stop_reason,
            token_bytes=sum(int(array.nbytes) for array in arrays),
            route_bytes=0 if sample.routing is None else sample.routing.num_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]
