"""From the array an engine returns to a `RoutingTrace`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onroute.core.errors import CheckError
from onroute.core.routing import ExpertIds, RoutingTrace, expert_dtype

_FIX: Final = "check that the engine serves the model that is trained, with route capture on"
_DIMENSIONS: Final = 3


def narrowed(ids: NDArray[Any], num_experts: int) -> ExpertIds:
    """`ids` in the smallest type that holds every expert id; the values are taken to be in range."""
    if expert_dtype(num_experts) is np.uint8:
        return ids.astype(np.uint8, copy=False)
    return ids.astype(np.uint16, copy=False)


def trace_from_engine_rows(
    rows: NDArray[Any], *, num_tokens: int, layers: Sequence[int], num_experts: int, sample_id: str
) -> RoutingTrace:
    """A trace from an engine's rows over *all* decoder layers; the columns of dense layers are dropped.

    rows: integers [num_tokens - 1, num_decoder_layers, top_k]. A row more, which some engines add for
        the last sampled token, is dropped: that token was never fed.
    layers: the decoder layers that route, ascending.

    Raises:
        CheckError: not integers; another number of rows; too few layers; an id that is negative or
            not below `num_experts`.
    """
    _check_form(rows, num_tokens, layers, sample_id)
    ids_TLK = rows[: num_tokens - 1, list(layers)]
    outside = (ids_TLK < 0) | (ids_TLK >= num_experts)
    if outside.any():
        position, column, slot = (int(i) for i in np.argwhere(outside)[0])
        raise CheckError(
            "routing-id-range",
            f"expert id {int(ids_TLK[position, column, slot])} is not in 0..{num_experts - 1} "
            f"({int(outside.sum())} such ids)",
            f"sample {sample_id}, layer {layers[column]}, position {position}",
            "a row is replayed whole or not at all; " + _FIX,
        )
    experts = np.zeros((num_tokens, *ids_TLK.shape[1:]), dtype=expert_dtype(num_experts))
    experts[: num_tokens - 1] = ids_TLK
    return RoutingTrace(
        experts=narrowed(experts, num_experts),
        layers=tuple(layers),
        num_experts=num_experts,
        valid=np.arange(num_tokens) < num_tokens - 1,
    )


def _check_form(rows: NDArray[Any], num_tokens: int, layers: Sequence[int], sample_id: str) -> None:
    where = f"sample {sample_id}"
    if not np.issubdtype(rows.dtype, np.integer):
        raise CheckError("routing-dtype", f"routes are {rows.dtype}, expected integers", where, _FIX)
    if rows.ndim != _DIMENSIONS:
        raise CheckError(
            "routing-shape",
            f"routes have {rows.ndim} dimensions, expected [rows, layers, top_k]",
            where,
            _FIX,
        )
    if len(rows) not in (num_tokens - 1, num_tokens):
        raise CheckError(
            "routing-rows",
            f"{len(rows)} route rows for {num_tokens} tokens, expected {num_tokens - 1}",
            where,
            "ask the engine for prompt and response rows together",
        )
    if rows.shape[1] <= max(layers):
        raise CheckError(
            "routing-layers",
            f"routes cover {rows.shape[1]} decoder layers, the model routes up to layer {max(layers)}",
            where,
            _FIX,
        )
