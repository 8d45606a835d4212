"""Groups of samples as a few flat arrays and one JSON text, and back.

Per-token arrays of all samples lie end to end, in order; routing only of the samples that have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.core.samples import Group, Prompt, Sample, StopReason
from onroute.data.fields import TOKEN_DTYPES

Array = NDArray[Any]


def encode(groups: Sequence[Group]) -> tuple[dict[str, Array], str]:
    """Arrays by name, and the JSON text of everything that is no array.

    Raises:
        CheckError: no groups, or samples routed through different layers or expert counts.
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        raise CheckError("data-batch", "empty batch", "rollouts to record", "record at least one sample")
    traces = [sample.routing for sample in samples if sample.routing is not None]
    arrays: dict[str, Array] = {
        "group_sizes": np.array([len(group.samples) for group in groups], dtype=np.int64),
        "prompt_tokens": np.concatenate([group.prompt.tokens for group in groups]),
        "prompt_sizes": np.array([len(group.prompt.tokens) for group in groups], dtype=np.int64),
        "sizes": np.array([sample.num_tokens for sample in samples], dtype=np.int64),
        "prompt_lengths": np.array([sample.prompt_length for sample in samples], dtype=np.int64),
        "rewards": np.array([sample.reward for sample in samples], dtype=np.float64),
        "routed": np.array([sample.routing is not None for sample in samples], dtype=np.bool_),
    }
    for name in TOKEN_DTYPES:
        arrays[name] = np.concatenate([getattr(sample, name) for sample in samples])
    if traces:
        arrays["experts"] = np.concatenate([trace.experts for trace in _alike(traces)])
        arrays["valid"] = np.concatenate([trace.valid for trace in traces])
    records = {
        "prompts": [
            {"id": g.prompt.id, "text": g.prompt.text, "metadata": dict(g.prompt.metadata)} for g in groups
        ],
        "samples": [{"id": s.id, "prompt_id": s.prompt_id, "stop_reason": s.stop_reason} for s in samples],
        "layers": list(traces[0].layers) if traces else [],
        "num_experts": traces[0].num_experts if traces else 0,
    }
    return arrays, json.dumps(records)


def decode(arrays: Mapping[str, Array], records_json: str) -> list[Group]:
    """What `encode` was given, bit for bit. The input is not trusted.

    Raises:
        ValueError, KeyError, TypeError: it does not describe groups of samples.
    """
    records = json.loads(records_json)
    prompts = _decode_prompts(arrays, _records(records, "prompts"))
    samples = _decode_samples(arrays, records)
    sizes = _array(arrays, "group_sizes", np.int64)
    if len(sizes) != len(prompts):
        raise ValueError(f"{len(sizes)} group sizes for {len(prompts)} prompts")
    bounds = _bounds(sizes, len(samples), "group_sizes")
    return [
        Group(prompt=prompt, samples=tuple(samples[a:b]))
        for prompt, (a, b) in zip(prompts, pairwise(bounds), strict=True)
    ]


def _decode_prompts(arrays: Mapping[str, Array], records: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    tokens = _array(arrays, "prompt_tokens", np.int32)
    pieces = _pieces(tokens, _array(arrays, "prompt_sizes", np.int64), len(records), "prompt_sizes")
    return [
        Prompt(
            id=_text(record, "id"),
            tokens=piece,
            text=_text(record, "text"),
            metadata=_is(record["metadata"], dict, "prompt metadata"),
        )
        for record, piece in zip(records, pieces, strict=True)
    ]


def _decode_samples(arrays: Mapping[str, Array], records: Mapping[str, Any]) -> list[Sample]:
    rows = _records(records, "samples")
    sizes = _array(arrays, "sizes", np.int64)
    per_token = {
        name: _pieces(_array(arrays, name, dtype), sizes, len(rows), f"sizes of {name}")
        for name, dtype in TOKEN_DTYPES.items()
    }
    prompt_lengths = _array(arrays, "prompt_lengths", np.int64, len(rows))
    rewards = _array(arrays, "rewards", np.float64, len(rows))
    traces = _decode_traces(arrays, records, sizes)
    return [
        Sample(
            id=_text(row, "id"),
            prompt_id=_text(row, "prompt_id"),
            tokens=per_token["tokens"][i],
            prompt_length=int(prompt_lengths[i]),
            loss_mask=per_token["loss_mask"][i],
            log_probs=per_token["log_probs"][i],
            weight_versions=per_token["weight_versions"][i],
            routing=traces[i],
            reward=float(rewards[i]),
            stop_reason=_stop_reason(row),
        )
        for i, row in enumerate(rows)
    ]


def _decode_traces(
    arrays: Mapping[str, Array], records: Mapping[str, Any], sizes: NDArray[np.int64]
) -> list[RoutingTrace | None]:
    routed = _array(arrays, "routed", np.bool_, len(sizes))
    if not routed.any():
        return [None] * len(sizes)
    layers = tuple(_is(layer, int, "layer") for layer in _is(records["layers"], list, "layers"))
    num_experts = _is(records["num_experts"], int, "num_experts")
    if not layers or layers[0] < 0 or any(a > b for a, b in pairwise(layers)):
        raise ValueError(f"layers {layers} do not ascend")
    wide = arrays["experts"].dtype == np.uint16
    experts = _array(arrays, "experts", np.uint16 if wide else np.uint8, ndim=3)
    if experts.shape[1] != len(layers) or experts.shape[2] < 1:
        raise ValueError(f"experts {list(experts.shape)} for {len(layers)} layers")
    if experts.size and int(experts.max()) >= num_experts:
        raise ValueError(f"expert id {experts.max()} of {num_experts} experts")
    count = int(routed.sum())
    experts_of = iter(_pieces(experts, sizes[routed], count, "sizes of experts"))
    valid_of = iter(_pieces(_array(arrays, "valid", np.bool_), sizes[routed], count, "sizes of valid"))
    return [
        RoutingTrace(experts=next(experts_of), layers=layers, num_experts=num_experts, valid=next(valid_of))
        if has_trace
        else None
        for has_trace in routed
    ]


def _alike(traces: Sequence[RoutingTrace]) -> Sequence[RoutingTrace]:
    kinds = {(trace.layers, trace.num_experts, trace.top_k, trace.experts.dtype.name) for trace in traces}
    if len(kinds) > 1:
        raise CheckError(
            "data-routing-kinds",
            f"samples were routed through {len(kinds)} kinds of model: {sorted(kinds)}",
            "rollouts to record",
            "record the samples of one model at a time",
        )
    return traces


def _array(
    arrays: Mapping[str, Array], name: str, dtype: type[np.generic], length: int | None = None, ndim: int = 1
) -> Array:
    array = arrays[name]
    if array.dtype != dtype or array.ndim != ndim or (length is not None and len(array) != length):
        expected = f"{np.dtype(dtype)} of {ndim} dimension(s)" + (
            "" if length is None else f", {length} long"
        )
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, expected {expected}")
    return array


def _pieces(array: Array, sizes: NDArray[np.int64], count: int, name: str) -> list[Array]:
    if len(sizes) != count:
        raise ValueError(f"{name}: {len(sizes)} of them for {count} records")
    return [array[a:b] for a, b in pairwise(_bounds(sizes, len(array), name))]


def _bounds(sizes: NDArray[np.int64], total: int, name: str) -> list[int]:
    """Where pieces of these sizes begin and end. Python integers, which no hostile size overflows."""
    bounds = [0]
    for size in sizes.tolist():
        if size < 0:
            raise ValueError(f"{name} holds {size}")
        bounds.append(bounds[-1] + size)
    if bounds[-1] != total:
        raise ValueError(f"{name} add up to {bounds[-1]}, not {total}")
    return bounds


def _records(records: Any, name: str) -> list[Mapping[str, Any]]:
    rows = _is(_is(records, dict, "the record")[name], list, name)
    return [_is(row, dict, name) for row in rows]


def _text(record: Mapping[str, Any], key: str) -> str:
    text: str = _is(record[key], str, key)
    return text


def _stop_reason(record: Mapping[str, Any]) -> StopReason:
    for reason in get_args(StopReason):
        if record["stop_reason"] == reason:
            known: StopReason = reason
            return known
    raise ValueError(f"unknown stop reason {record['stop_reason']!r}")


def _is(value: Any, kind: type[Any], name: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is {type(value).__name__}, expected {kind.__name__}")
    return value
