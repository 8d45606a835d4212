"""The routes of one microbatch, laid out as the model will see its tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from onroute.core.batches import TokenSpan
from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace, expert_dtype
from onroute.routing.sites import RoutingMap

_GOLDEN: Final = -0x61C8864680B583EB
"""2^64 divided by the golden ratio, as a signed integer: spreads consecutive positions over all bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchRoutes:
    """R rows of which some have a recorded route. Tensors are on the device of the model.

    ids_LRK: int64, the recorded experts; anything where a row is not valid.
    valid_R: bool, rows that are replayed. The others use the live router.
    multipliers_RK: int64, odd and different by position; see `digest`.
    digest_L: int64, what the ledger must see of one pass.
    num_valid, num_tokens: replayed rows, and real tokens: rows that belong to a sample.
    num_unfed: real tokens that were sampled last and never fed to the engine, so have no route.
    """

    key: Hashable
    ids_LRK: Tensor
    valid_R: Tensor
    multipliers_RK: Tensor
    digest_L: Tensor
    num_valid: int
    num_tokens: int
    num_unfed: int

    def digest(self, ids: Tensor) -> Tensor:
        """Sum over valid rows of multiplier * (id + 1), modulo 2^64: [..., R, K] -> [...].

        Multipliers differ by position, so rows that are shifted or permuted give another sum.
        """
        terms = (ids + 1) * self.multipliers_RK
        return torch.where(self.valid_R[:, None], terms, 0).sum(dim=(-2, -1))


def lay_out(
    key: Hashable,
    spans: Sequence[TokenSpan],
    num_rows: int,
    *,
    traces: Mapping[int, RoutingTrace],
    routing_map: RoutingMap,
    device: torch.device,
) -> MicrobatchRoutes:
    """Put the rows of each sample's trace where its tokens lie; samples without a trace stay live.

    Raises:
        CheckError: a span leaves the microbatch, overlaps another, or is not as long as its trace.
    """
    _check_spans(key, spans, num_rows, traces)
    shape_RLK = (num_rows, len(routing_map.sites), routing_map.top_k)
    ids_RLK = np.zeros(shape_RLK, dtype=expert_dtype(routing_map.num_experts))
    valid_R = np.zeros(num_rows, dtype=np.bool_)
    num_unfed = 0
    for span in spans:
        trace = traces.get(span.sample)
        if trace is not None:
            rows = slice(span.offset, span.offset + span.length)
            ids_RLK[rows], valid_R[rows] = trace.experts, trace.valid
        num_unfed += int(trace is None or not trace.valid[-1])
    ids_LRK = torch.from_numpy(ids_RLK).to(device).to(torch.int64).transpose(0, 1).contiguous()
    routes = MicrobatchRoutes(
        key=key,
        ids_LRK=ids_LRK,
        valid_R=torch.from_numpy(valid_R).to(device),
        multipliers_RK=_multipliers(num_rows, routing_map.top_k, device),
        digest_L=torch.empty(len(routing_map.sites), dtype=torch.int64, device=device),
        num_valid=int(valid_R.sum()),
        num_tokens=sum(span.length for span in spans),
        num_unfed=num_unfed,
    )
    routes.digest_L.copy_(routes.digest(ids_LRK))
    return routes


def _multipliers(num_rows: int, top_k: int, device: torch.device) -> Tensor:
    positions = torch.arange(1, num_rows * top_k + 1, dtype=torch.int64, device=device)
    return ((positions * _GOLDEN) | 1).reshape(num_rows, top_k)


def _check_spans(
    key: Hashable, spans: Sequence[TokenSpan], num_rows: int, traces: Mapping[int, RoutingTrace]
) -> None:
    end = 0
    for span in sorted(spans, key=lambda s: s.offset):
        where = f"microbatch {key}, sample {span.sample}"
        if span.offset < end or span.length < 1 or span.offset + span.length > num_rows:
            raise CheckError(
                "routing-span",
                f"span of {span.length} tokens at {span.offset} overlaps another or leaves {num_rows} rows",
                where,
                "lay samples out one after the other inside the microbatch",
            )
        end = span.offset + span.length
        trace = traces.get(span.sample)
        if trace is not None and trace.num_tokens != span.length:
            raise CheckError(
                "routing-span-length",
                f"the trace has {trace.num_tokens} rows for {span.length} tokens",
                where,
                "shorten tokens and trace together",
            )
