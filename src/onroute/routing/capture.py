"""Records the routes of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace, expert_dtype
from onroute.routing.interception import RouterHooks
from onroute.routing.sites import RoutingMap
from onroute.routing.wire import narrowed


class RouteRecord:
    """What one forward pass chose. Reading `ids` is possible once the recording has ended."""

    def __init__(self, routing_map: RoutingMap) -> None:
        self._map = routing_map
        self._columns: list[list[Tensor]] = [[] for _ in routing_map.sites]
        self._ids_LRK: Tensor | None = None

    def choose(self, column: int, live_ids: Tensor, masked: Tensor | None) -> Tensor | None:
        self._columns[column].append(live_ids.detach())
        return None

    @property
    def ids(self) -> Tensor:
        """int64 [num_layers, rows, top_k] on the model's device; rows are batch * sequence."""
        if self._ids_LRK is None:
            raise CheckError(
                "routing-record-open",
                "the routes are not complete yet",
                "inside recording()",
                "read them after the with block",
            )
        return self._ids_LRK

    def close(self) -> None:
        """Raises CheckError unless every router was asked exactly once."""
        asked = zip(self._map.layers, map(len, self._columns), strict=True)
        wrong = [f"layer {layer}: {times}" for layer, times in asked if times != 1]
        if wrong:
            raise CheckError(
                "routing-record-incomplete",
                f"{len(wrong)} of {len(self._columns)} routers were not asked exactly once",
                "times asked: " + ", ".join(wrong[:10]),
                "record exactly one forward pass of the model the hooks are on",
            )
        self._ids_LRK = torch.stack([column[0] for column in self._columns])
        self._columns = []


class RouteRecorder:
    """Records forward passes through hooks that are installed. Changes nothing, synchronises nothing.

    >>> with recorder.recording() as record:
    ...     model(input_ids)
    >>> record.ids.shape  # [num_layers, batch * sequence, top_k]
    """

    def __init__(self, hooks: RouterHooks) -> None:
        self._hooks = hooks

    @contextmanager
    def recording(self) -> Iterator[RouteRecord]:
        """Record one forward pass."""
        record = RouteRecord(self._hooks.map)
        with self._hooks.using(record):
            yield record
        record.close()


def trace_of(ids_LTK: Tensor, routing_map: RoutingMap, *, num_tokens: int) -> RoutingTrace:
    """The trace of one sample from its rows, in token order.

    ids_LTK: [num_layers, rows, top_k] with rows = num_tokens, or num_tokens - 1 when the last token
        was sampled and never fed; its row is then invalid.

    Raises:
        CheckError: any other number of rows, or another number of layers or experts per token.
    """
    layers, rows, top_k = ids_LTK.shape
    expected = (len(routing_map.sites), routing_map.top_k)
    if (layers, top_k) != expected or rows not in (num_tokens - 1, num_tokens):
        raise CheckError(
            "routing-record-shape",
            f"routes [layers, rows, top_k] are [{layers}, {rows}, {top_k}]",
            f"expected [{expected[0]}, {num_tokens - 1} or {num_tokens}, {expected[1]}]",
            "join all pieces of this sample, and no padding, before building its trace",
        )
    num_experts = routing_map.num_experts
    ids_TLK = ids_LTK.transpose(0, 1)
    if rows < num_tokens:
        ids_TLK = torch.cat([ids_TLK, ids_TLK.new_zeros(1, layers, top_k)])
    # Narrowed on the device, so that the transfer is small; torch has few kernels for uint16.
    narrow = torch.uint8 if expert_dtype(num_experts) is np.uint8 else torch.int32
    experts = narrowed(ids_TLK.to(narrow).cpu().numpy(), num_experts)
    valid = np.arange(num_tokens) < rows
    return RoutingTrace(experts=experts, layers=routing_map.layers, num_experts=num_experts, valid=valid)
