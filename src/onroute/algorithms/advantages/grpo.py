"""Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onroute.algorithms.advantages.base import Advantages
from onroute.algorithms.catalog import GrpoOptions
from onroute.core.errors import CheckError

STD_EPS = 1e-6
EQUAL_WITHIN = 1e-6
"""Rewards of a group that lie within this range are equal: a spread of that size is rounding noise,
and dividing by its standard deviation would blow it up to advantages of order one."""


def grpo(rewards: NDArray[np.float64], groups: NDArray[np.int64], options: GrpoOptions) -> Advantages:
    """A_i = (r_i - mean(group)) / (std(group) + 1e-6), std unbiased; without the division when
    `normalize_std` is off.

    Groups are found by number, in any order. Equal rewards give exactly 0, as does a group of one.

    Raises:
        CheckError: a reward is not finite, or a sample has no group.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    _check(rewards, groups)
    values = np.zeros_like(rewards)
    zero_variance = single = 0
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        of_group = rewards[members]
        if members.size == 1:
            single += 1
        elif np.ptp(of_group) <= EQUAL_WITHIN:
            zero_variance += 1
        else:
            centred = of_group - of_group.mean()
            scale = of_group.std(ddof=1) + STD_EPS if options.normalize_std else 1.0
            values[members] = centred / scale
    metrics = {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/zero_variance_groups": float(zero_variance),
        "rollout/single_sample_groups": float(single),
    }
    return Advantages(values=values, metrics=metrics)


def _check(rewards: NDArray[np.float64], groups: NDArray[np.int64]) -> None:
    if rewards.ndim != 1 or rewards.shape != groups.shape or rewards.size == 0:
        raise CheckError(
            "algorithms-batch",
            f"rewards {list(rewards.shape)} and groups {list(groups.shape)} do not describe a batch",
            "advantage grpo",
            "give one reward and one group number to each of at least one sample",
        )
    bad = np.flatnonzero(~np.isfinite(rewards))
    if bad.size:
        raise CheckError(
            "algorithms-reward",
            f"reward is {rewards[bad[0]]}",
            f"sample {bad[0]} of the batch ({bad.size} such of {rewards.size})",
            "make the environment's reward a finite number",
        )
    ungrouped = np.flatnonzero(groups < 0)
    if ungrouped.size:
        raise CheckError(
            "algorithms-group",
            f"group number is {groups[ungrouped[0]]}",
            f"sample {ungrouped[0]} of the batch ({ungrouped.size} such of {groups.size})",
            "number the groups from 0",
        )
