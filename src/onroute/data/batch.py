"""Groups of samples as the batch of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onroute.core.batches import BatchPlan, TrainBatch
from onroute.core.samples import Group, Sample


def flatten(groups: Sequence[Group]) -> tuple[list[Sample], list[int]]:
    """All samples in order, and the number of the group that each belongs to."""
    samples = [sample for group in groups for sample in group.samples]
    numbers = [number for number, group in enumerate(groups) for _ in group.samples]
    return samples, numbers


def train_batch(samples: Sequence[Sample], groups: Sequence[int], plan: BatchPlan, rank: int) -> TrainBatch:
    """What `rank` needs of the planned batch: its own samples, and the numbers of all."""
    return TrainBatch(
        plan=plan,
        samples={index: samples[index] for index in plan.samples_of(rank)},
        rewards=np.array([sample.reward for sample in samples], dtype=np.float64),
        groups=np.array(groups, dtype=np.int64),
        loss_tokens=np.array([int(sample.loss_mask.sum()) for sample in samples], dtype=np.int64),
    )
