"""Refuses a trace that cannot be the route of its tokens, before a gradient is taken from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.core.samples import Tokens

CONSTANT_RUN: Final = 64
"""So many tokens in a row with the very same experts in all layers are a stale buffer, not a route."""

_SERVE: Final = "check that the engine serves the model that is trained"
_CAPTURE: Final = "check that the engine's option to capture and return routed experts is on and took effect"


def validate_trace(
    trace: RoutingTrace,
    *,
    num_tokens: int,
    layers: Sequence[int],
    num_experts: int,
    top_k: int,
    sample_id: str,
    tokens: Tokens | None = None,
    last_is_sampled: bool = True,
) -> None:
    """Check one trace on arrival, at tensor speed.

    layers, num_experts, top_k: what the model's `RoutingMap` says.
    tokens: [num_tokens] ids. When given, a constant run over one repeated token is no fault: the
        router may well send the same token the same way.
    last_is_sampled: the last token was never an input, so its row must be invalid.

    Raises:
        CheckError: names what was expected and given, the sample, and where it applies the layer
            and the position.
    """
    _check_shape(trace, num_tokens, tuple(layers), top_k, sample_id)
    _check_types(trace, num_experts, sample_id)
    _check_valid_mask(trace, last_is_sampled, sample_id)
    positions = np.flatnonzero(trace.valid)
    ids_VLK = trace.experts[positions]
    if len(positions):
        _check_range(trace, ids_VLK, positions, sample_id)
        _check_not_zero(trace, ids_VLK, sample_id)
        _check_distinct(trace, ids_VLK, positions, sample_id)
        _check_not_constant(ids_VLK, positions, tokens, sample_id)


def _check_shape(
    trace: RoutingTrace, num_tokens: int, layers: tuple[int, ...], top_k: int, sample_id: str
) -> None:
    where = f"sample {sample_id}"
    shape = trace.experts.shape
    if len(shape) != 3:
        raise CheckError("routing-shape", f"routes have shape {shape}, expected 3 dimensions", where, _SERVE)
    if shape[1] != len(layers) or trace.layers != layers:
        raise CheckError(
            "routing-layers",
            f"routes have {shape[1]} layers {trace.layers}, the model routes in {len(layers)}: {layers}",
            where,
            _SERVE,
        )
    if shape[2] != top_k:
        raise CheckError(
            "routing-top-k", f"routes hold {shape[2]} experts per token, expected {top_k}", where, _SERVE
        )
    if shape[0] != num_tokens:
        raise CheckError(
            "routing-rows",
            f"{shape[0]} route rows for {num_tokens} tokens",
            where,
            "keep one row per token of prompt and response, and shorten both together",
        )


def _check_types(trace: RoutingTrace, num_experts: int, sample_id: str) -> None:
    where = f"sample {sample_id}"
    if trace.experts.dtype not in (np.uint8, np.uint16):
        raise CheckError(
            "routing-dtype",
            f"routes are {trace.experts.dtype}, expected uint8 or uint16",
            where,
            "convert what the engine returns with trace_from_engine_rows",
        )
    if trace.num_experts != num_experts:
        raise CheckError(
            "routing-num-experts",
            f"routes are over {trace.num_experts} experts, the model has {num_experts}",
            where,
            _SERVE,
        )


def _check_valid_mask(trace: RoutingTrace, last_is_sampled: bool, sample_id: str) -> None:
    expected = (trace.num_tokens,)
    if trace.valid.shape != expected or trace.valid.dtype != np.bool_:
        raise CheckError(
            "routing-valid",
            f"the mask of valid rows is {trace.valid.dtype} {trace.valid.shape}, expected bool {expected}",
            f"sample {sample_id}",
            "give one flag per token",
        )
    fed = trace.valid[:-1] if last_is_sampled else trace.valid
    if not fed.all():
        raise CheckError(
            "routing-rows-missing",
            f"{int((~fed).sum())} of {len(fed)} tokens that were inputs have no route",
            f"sample {sample_id}, first at position {int(np.argmin(fed))}",
            _CAPTURE,
        )
    if last_is_sampled and trace.num_tokens and trace.valid[-1]:
        raise CheckError(
            "routing-last-row",
            "the row of the last sampled token is marked valid, but that token was never an input",
            f"sample {sample_id}, position {trace.num_tokens - 1}",
            "mark it invalid",
        )


def _check_range(trace: RoutingTrace, ids_VLK: NDArray[Any], positions: NDArray[Any], sample_id: str) -> None:
    if int(ids_VLK.max()) < trace.num_experts:
        return
    row, column, slot = np.argwhere(ids_VLK >= trace.num_experts)[0]
    raise CheckError(
        "routing-id-range",
        f"expert id {int(ids_VLK[row, column, slot])} is not in 0..{trace.num_experts - 1}",
        f"sample {sample_id}, layer {trace.layers[column]}, position {positions[row]}",
        _SERVE,
    )


def _check_not_zero(trace: RoutingTrace, ids_VLK: NDArray[Any], sample_id: str) -> None:
    zero = np.flatnonzero(~ids_VLK.any(axis=(0, 2))) if trace.top_k > 1 else np.empty(0, dtype=np.intp)
    if zero.size:
        raise CheckError(
            "routing-all-zero",
            f"engine returned all-zero routes for {zero.size}/{len(trace.layers)} layers",
            f"sample {sample_id}, first layer {trace.layers[zero[0]]}, {len(ids_VLK)} rows",
            _CAPTURE,
        )


def _check_distinct(
    trace: RoutingTrace, ids_VLK: NDArray[Any], positions: NDArray[Any], sample_id: str
) -> None:
    ordered = np.sort(ids_VLK, axis=-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if repeated.any():
        row, column = np.argwhere(repeated)[0]
        raise CheckError(
            "routing-repeated-id",
            f"a token has the same expert twice: {ids_VLK[row, column].tolist()} "
            f"({int(repeated.sum())} such choices)",
            f"sample {sample_id}, layer {trace.layers[column]}, position {positions[row]}",
            _CAPTURE,
        )


def _check_not_constant(
    ids_VLK: NDArray[Any], positions: NDArray[Any], tokens: Tokens | None, sample_id: str
) -> None:
    same = (ids_VLK[1:] == ids_VLK[:-1]).all(axis=(1, 2))
    edges = np.flatnonzero(np.concatenate(([True], ~same, [True])))
    for run in np.flatnonzero(np.diff(edges) >= CONSTANT_RUN):
        begin, end = edges[run], edges[run + 1]
        one_token = tokens is not None and len(np.unique(tokens[positions[begin:end]])) == 1
        if not one_token:
            raise CheckError(
                "routing-constant",
                f"constant routes over {end - begin} tokens in all {ids_VLK.shape[1]} layers",
                f"sample {sample_id}, from position {positions[begin]}",
                "the engine returned a stale buffer; " + _CAPTURE,
            )
