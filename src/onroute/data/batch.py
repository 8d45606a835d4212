"""Groups of samples as the batch of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onroute.core.batches import BatchPlan, TrainBatch
from onroute.core.samples import Group, Sample, SampleFacts


def flatten(groups: Sequence[Group]) -> tuple[list[Sample], list[int]]:
    """All samples in order, and the number of the group that each belongs to."""
    samples = [sample for group in groups for sample in group.samples]
    numbers = [number for number, group in enumerate(groups) for _ in group.samples]
    return samples, numbers


def facts_of(group: Group) -> tuple[SampleFacts, ...]:
    """The facts of a group's samples, in order."""
    return tuple(SampleFacts.of(sample) for sample in group.samples)


def train_batch(
    plan: BatchPlan,
    rank: int,
    *,
    samples: Mapping[int, Sample],
    facts: Sequence[SampleFacts],
    groups: Sequence[int],
) -> TrainBatch:
    """What `rank` needs of the planned batch: its own samples, and the numbers of all.

    samples: by global index, at least those of this rank. facts, groups: of all samples, in order.
    """
    return TrainBatch(
        plan=plan,
        samples={index: samples[index] for index in plan.samples_of(rank)},
        rewards=np.array([fact.reward for fact in facts], dtype=np.float64),
        groups=np.array(groups, dtype=np.int64),
        loss_tokens=np.array([fact.loss_tokens for fact in facts], dtype=np.int64),
    )


def whole_batch(samples: Sequence[Sample], groups: Sequence[int], plan: BatchPlan, rank: int) -> TrainBatch:
    """`train_batch` where all samples are at hand."""
    facts = [SampleFacts.of(sample) for sample in samples]
    return train_batch(plan, rank, samples=dict(enumerate(samples)), facts=facts, groups=groups)
