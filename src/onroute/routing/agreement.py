"""How far two routes of the same tokens are the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """|A ∩ B| / top_k, averaged over the rows that are valid in both.

    per_layer: float64 [num_layers]. mean: over layers. Both are NaN-free: `num_rows` is at least 1.
    """

    mean: float
    per_layer: NDArray[np.float64]
    num_rows: int


def agreement(a: RoutingTrace, b: RoutingTrace) -> Agreement:
    """Agreement of two traces of one sample.

    Experts [0, 1] and [1, 2] agree by 1/2; the order within a choice does not matter.

    Raises:
        CheckError: the traces are of other layers, sizes or tokens, or share no valid row.
    """
    shapes = [(t.experts.shape, t.layers, t.num_experts) for t in (a, b)]
    if shapes[0] != shapes[1]:
        raise CheckError(
            "routing-agreement-shape",
            f"traces cannot be compared: {shapes[0]} and {shapes[1]}",
            "(shape, layers, num_experts)",
            "compare traces of the same tokens from the same model",
        )
    rows = a.valid & b.valid
    if not rows.any():
        raise CheckError(
            "routing-agreement-empty",
            "the traces share no valid row",
            f"{int(a.valid.sum())} and {int(b.valid.sum())} valid of {a.num_tokens}",
            "compare traces of the same tokens",
        )
    ids_a, ids_b = a.experts[rows], b.experts[rows]
    # One slot at a time: top_k comparisons of [rows, layers, top_k] instead of one top_k times as large.
    hits = np.zeros(ids_a.shape[1], dtype=np.float64)
    for slot in range(a.top_k):
        hits += (ids_a[:, :, slot, None] == ids_b).any(axis=-1).sum(axis=0)
    per_layer = hits / (len(ids_a) * a.top_k)
    return Agreement(mean=float(per_layer.mean()), per_layer=per_layer, num_rows=len(ids_a))
