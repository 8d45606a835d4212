"""What every advantage takes and gives. Numbers per sample are numpy, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Options_contra = TypeVar("Options_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """values: [N] float64, one per sample; every loss token of a sample gets the same.

    metrics: plain numbers under their published names.
    """

    values: NDArray[np.float64]
    metrics: Mapping[str, float]


class Advantage(Protocol[Options_contra]):
    def __call__(
        self, rewards: NDArray[np.float64], groups: NDArray[np.int64], options: Options_contra
    ) -> Advantages:
        """Rewards [N] and group numbers [N] of one batch, in any order, to advantages in that order."""
        ...
