"""From samples to what a rank feeds its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onroute.core.samples import Sample

if TYPE_CHECKING:
    import torch

Layout: TypeAlias = Literal["rows", "packed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Who trains what, when: `assignment[rank][step][microbatch]` is a tuple of sample indices.

    Every rank has the same number of microbatches in a step, so that collectives meet; an empty
    tuple is a filler microbatch (one dummy token whose loss counts nothing).

    Five samples on two ranks, one optimizer step:
    assignment (((  (0, 3), (4,)  ),), ((  (1, 2), ()  ),)).
    """

    num_samples: int
    assignment: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.assignment)

    @property
    def num_steps(self) -> int:
        return len(self.assignment[0])

    def samples_of(self, rank: int) -> tuple[int, ...]:
        """Indices of all samples that `rank` needs, ascending."""
        return tuple(sorted(i for step in self.assignment[rank] for mb in step for i in mb))

    def explain(self) -> str:
        microbatches = sum(len(step) for step in self.assignment[0])
        return (
            f"{self.num_samples} samples on {self.num_ranks} rank(s), {self.num_steps} optimizer step(s), "
            f"{microbatches} microbatch(es) per rank"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One batch as one rank gets it.

    samples: the samples of this rank by global index (see `BatchPlan.samples_of`).
    rewards: [num_samples] float64, of all samples, in global order.
    groups: [num_samples] int64, the group number of each sample, in global order.
    loss_tokens: [num_samples] int64, policy-produced tokens of each, in global order.
    """

    plan: BatchPlan
    samples: Mapping[int, Sample]
    rewards: NDArray[np.float64]
    groups: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Where one sample lies in a microbatch: its T tokens start at flat position `offset` of the
    microbatch's tokens, counted row by row (index = row * row_length + column)."""

    sample: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One microbatch as the model gets it. B rows of S columns; one row when packed.

    input_ids: int64 [B, S].
    position_ids: int64 [B, S], restarting at 0 with every sample.
    attention_mask: int64 [B, S] in padded rows (1 = real token); None when packed, since stock
        attention then finds the documents by their positions.
    spans: where each sample lies, in the order given; empty for a filler microbatch.
    """

    layout: Layout
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    spans: tuple[TokenSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step, the same on every rank.

    `stepped` is False when a non-finite loss or gradient made all ranks skip the update.
    `metrics` holds plain numbers under their published names, e.g. `train/grad_norm`.
    """

    stepped: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
