"""Replays recorded routes, looked up by (layer, microbatch).

No queue and no cursor: several forward passes may come before any backward pass, in any order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from onroute.core.batches import TokenSpan
from onroute.core.errors import CheckError, UserError
from onroute.core.routing import RoutingTrace
from onroute.routing.ledger import Ledger, Pass, Reduce
from onroute.routing.metrics import RoutingMetrics
from onroute.routing.microbatch import MicrobatchRoutes, lay_out
from onroute.routing.sites import RoutingMap


@dataclass(frozen=True, slots=True)
class _Bound:
    """What the model is running now. `routes` is None in the recompute of a pass that was live."""

    routes: MicrobatchRoutes | None
    phase: Pass


class ReplaySession:
    """A handler for `RouterHooks`. One lives as long as its model; `holding` gives it the traces of a batch.

    >>> with hooks.using(session), session.holding(traces):
    ...     session.bind("mb0", batch.spans, batch.input_ids.numel())
    ...     with session.microbatch("mb0"):
    ...         loss = loss_of(model(batch.input_ids))
    ...     loss.backward()
    ...     metrics = session.settle(recompute=True, reduce=sum_over_ranks)
    """

    def __init__(self, routing_map: RoutingMap, device: torch.device) -> None:
        self.map, self._device = routing_map, device
        self._traces: dict[int, RoutingTrace] = {}
        self._microbatches: dict[Hashable, MicrobatchRoutes] = {}
        self._ledger = Ledger(routing_map, device)
        self._bound: _Bound | None = None

    @property
    def open_keys(self) -> tuple[Hashable, ...]:
        """Microbatches that have run and await their settlement."""
        return self._ledger.keys

    def load(self, traces: Mapping[int, RoutingTrace]) -> None:
        """Take the traces of a batch, by sample index, in place of all earlier ones.

        Raises:
            CheckError: a trace does not fit the model's routers.
        """
        for sample, trace in traces.items():
            self._check_fit(sample, trace)
        self._traces = dict(traces)

    def bind(self, key: Hashable, spans: Sequence[TokenSpan], num_rows: int) -> None:
        """Lay the traces out for one microbatch of `num_rows` rows (batch * sequence, padding included).

        Rows without a recorded route use the live router: padding, the row of a last sampled token,
        samples without a trace. No spans make a filler microbatch, which is counted all the same.

        Raises:
            CheckError: the key awaits its settlement, or the spans do not fit.
        """
        if key in self._ledger.keys:
            raise CheckError(
                "routing-rebound",
                "a microbatch that has run was bound again before settle()",
                f"microbatch {key}",
                "settle first, or give it another key",
            )
        self._microbatches[key] = lay_out(
            key, spans, num_rows, traces=self._traces, routing_map=self.map, device=self._device
        )

    @contextmanager
    def microbatch(self, key: Hashable) -> Iterator[None]:
        """One forward pass of the model over this microbatch runs inside.

        Whether gradients are on when it is entered decides whether a recompute is due.
        """
        if key not in self._microbatches:
            raise CheckError(
                "routing-unbound",
                "this microbatch is not bound",
                f"microbatch {key}",
                "bind() it first; settle() and clear() release what has run",
            )
        routes = self._microbatches[key]
        self._ledger.enter(routes, grad=torch.is_grad_enabled())
        with _Rebinding(self, _Bound(routes, "forward")):
            yield

    def context_fn(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=session.context_fn)`.

        Called in the forward pass: the recompute context it returns runs as the microbatch of now.
        """
        routes = self._bound.routes if self._bound else None
        return nullcontext(), _Rebinding(self, _Bound(routes, "recompute"))

    def choose(self, column: int, live_ids: Tensor, masked: Tensor | None) -> Tensor | None:
        """See `RouteHandler`: recorded experts where a row has them, live ones elsewhere."""
        if self._bound is None:
            self._refuse_foreign_recompute(column)
            return None
        routes = self._bound.routes
        if routes is None:
            return None
        recorded_RK = routes.ids_LRK[column]
        if recorded_RK.shape != live_ids.shape:
            raise CheckError(
                "routing-rows",
                f"the router chooses {list(live_ids.shape)}, the bound routes are {list(recorded_RK.shape)}",
                f"layer {self.map.layers[column]}, microbatch {routes.key}",
                "bind the microbatch with the batch * sequence of the tokens that the model gets",
            )
        used = torch.where(routes.valid_R[:, None], recorded_RK, live_ids)
        self._ledger.observe(
            routes, self._bound.phase, column, live_RK=live_ids, used_RK=used, masked_RE=masked
        )
        return used

    def settle(self, *, recompute: bool, reduce: Reduce | None = None) -> RoutingMetrics:
        """Prove that all that ran since the last call was replayed, and release it. See `Ledger.settle`."""
        ran = self._ledger.keys
        try:
            return self._ledger.settle(recompute=recompute, reduce=reduce)
        finally:
            for key in ran:
                self._microbatches.pop(key, None)

    def clear(self) -> None:
        """Forget traces, microbatches and books."""
        self._traces.clear()
        self._microbatches.clear()
        self._ledger.reset()

    @contextmanager
    def holding(self, traces: Mapping[int, RoutingTrace]) -> Iterator[None]:
        """`load` for this context; afterwards nothing is left, also when the body raises."""
        self.load(traces)
        try:
            yield
        finally:
            self.clear()

    def _check_fit(self, sample: int, trace: RoutingTrace) -> None:
        layers, num_experts, top_k = given = (trace.layers, trace.num_experts, trace.top_k)
        if given != self.map.signature or trace.experts.shape[1] != len(layers):
            raise CheckError(
                "routing-trace-fit",
                f"the trace has {len(layers)} layers {layers}, {num_experts} experts, top {top_k}",
                f"sample {sample}; the model has {len(self.map.layers)} layers {self.map.layers}, "
                f"{self.map.num_experts} experts, top {self.map.top_k}",
                "serve the model that is trained",
            )

    def _refuse_foreign_recompute(self, column: int) -> None:
        # A recompute that comes without our context would silently take the live route.
        if self._ledger.keys and torch._C._current_graph_task_id() >= 0:
            raise CheckError(
                "routing-foreign-recompute",
                "a router runs inside a backward pass without the session's context",
                f"layer {self.map.layers[column]}",
                "checkpoint with use_reentrant=False and context_fn=session.context_fn",
            )


class _Rebinding(AbstractContextManager[None]):
    """Sets what the session runs, and puts back what was there. A recompute may be entered repeatedly."""

    def __init__(self, session: ReplaySession, bound: _Bound) -> None:
        self._session, self._mine = session, bound
        self._before: list[_Bound | None] = []

    def __enter__(self) -> None:
        self._before.append(self._session._bound)
        self._session._bound = self._mine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session._bound = self._before.pop()


def refuse_reentrant(use_reentrant: bool | None) -> None:
    """Raises UserError unless checkpointing is asked for with `use_reentrant=False`.

    The reentrant kind runs its first pass without gradients and has no `context_fn`, so a recompute
    could not know its microbatch.
    """
    if use_reentrant is not False:
        raise UserError(
            "routing-reentrant",
            f"activation checkpointing with use_reentrant={use_reentrant} cannot replay routes",
            "torch.utils.checkpoint",
            "set use_reentrant=False and context_fn=session.context_fn",
        )
