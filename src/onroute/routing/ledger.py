"""Proof that every router was replayed, once per pass, with the ids of the trace.

Counts are plain integers; digests and metrics accumulate on the device. `settle` is the one
transfer and the one reduction of an optimizer step, and the only place that can fail late: it does
so on all ranks together, before the optimizer moves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from onroute.core.errors import CheckError
from onroute.routing.metrics import RoutingMetrics, RoutingTotals
from onroute.routing.microbatch import MicrobatchRoutes
from onroute.routing.sites import RoutingMap

Pass: TypeAlias = Literal["forward", "recompute"]
PASSES: Final[tuple[Pass, Pass]] = ("forward", "recompute")
Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""Sums a 1-D float64 tensor over all ranks."""


@dataclass(slots=True, kw_only=True)
class _PassTally:
    """What the hooks did in one kind of pass over one microbatch: hits per layer, digest_L of the ids."""

    hits: list[int]
    digest_L: Tensor


@dataclass(slots=True, kw_only=True)
class _Tally:
    routes: MicrobatchRoutes
    passes: dict[Pass, _PassTally]
    due: dict[Pass, int] = field(default_factory=lambda: dict.fromkeys(PASSES, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    key: Hashable
    layer: int
    phase: Pass
    what: str

    def __str__(self) -> str:
        return f"layer {self.layer}, microbatch {self.key}, {self.phase} pass: {self.what}"


class Ledger:
    """Books of one optimizer step on one rank."""

    def __init__(self, routing_map: RoutingMap, device: torch.device) -> None:
        self._map, self._device = routing_map, device
        self._tallies: dict[Hashable, _Tally] = {}
        self.reset()

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """Microbatches that were entered since the last settlement."""
        return tuple(self._tallies)

    def reset(self) -> None:
        self._tallies.clear()
        num_layers = len(self._map.sites)
        self._common_L = torch.zeros(num_layers, dtype=torch.float64, device=self._device)
        self._exact_L = torch.zeros_like(self._common_L)
        self._conflicts_L = torch.zeros_like(self._common_L)

    def enter(self, routes: MicrobatchRoutes, *, grad: bool) -> None:
        """A forward pass over this microbatch begins; with gradients it may be recomputed later."""
        if routes.key not in self._tallies:
            self._tallies[routes.key] = self._new_tally(routes)
        tally = self._tallies[routes.key]
        tally.due["forward"] += 1
        tally.due["recompute"] += int(grad)

    @torch.no_grad()
    def observe(
        self,
        routes: MicrobatchRoutes,
        phase: Pass,
        column: int,
        *,
        live_RK: Tensor,
        used_RK: Tensor,
        masked_RE: Tensor | None = None,
    ) -> None:
        """Router `column` hands on `used_RK`, where its own choice was `live_RK`. No synchronisation.

        masked_RE: see `RouteHandler.choose`.
        """
        tally = self._tallies.get(routes.key)
        if tally is None or tally.routes is not routes:
            raise CheckError(
                "routing-ledger-closed",
                f"a {phase} pass runs after its books were settled",
                f"layer {self._map.layers[column]}, microbatch {routes.key}",
                "settle after the last backward pass of the step",
            )
        seen = tally.passes[phase]
        seen.hits[column] += 1
        seen.digest_L[column] += routes.digest(used_RK)
        if phase == "forward":
            self._compare(routes, column, live_RK, used_RK)
            if masked_RE is not None:
                conflict_R = masked_RE.gather(1, used_RK).any(dim=1) & routes.valid_R
                self._conflicts_L[column] += conflict_R.sum()

    def settle(self, *, recompute: bool, reduce: Reduce | None = None) -> RoutingMetrics:
        """Close the books of everything entered since the last call.

        recompute: whether the decoder layers are checkpointed, so that each forward pass with
            gradients must have been recomputed exactly once.

        Raises:
            CheckError: on every rank as soon as one rank has a fault; it names layer, microbatch and pass.
        """
        try:
            return self._settle(recompute, reduce)
        finally:
            self.reset()

    def _settle(self, recompute: bool, reduce: Reduce | None) -> RoutingMetrics:
        faults = self._count_faults(recompute)
        wrong_TPL = self._wrong_digests(recompute)
        totals = self._totals()
        num_faults = wrong_TPL.sum(dtype=torch.float64) + len(faults)
        local = torch.cat([num_faults[None], totals.to_tensor(self._device)])
        summed = local if reduce is None else reduce(local)
        # The only transfer: what all ranks agreed on, and this rank's own faults behind it.
        host = torch.cat([summed, wrong_TPL.flatten().to(torch.float64)]).cpu()
        faults += self._digest_faults(host[len(summed) :].reshape(wrong_TPL.shape))
        if host[0] > 0:
            raise _shortfall(faults, int(host[0]))
        return RoutingMetrics.of(RoutingTotals.from_tensor(host[1 : len(summed)]), self._map)

    def _compare(self, routes: MicrobatchRoutes, column: int, live_RK: Tensor, used_RK: Tensor) -> None:
        common_R = (used_RK[:, :, None] == live_RK[:, None, :]).any(dim=-1).sum(dim=-1)
        common_R = torch.where(routes.valid_R, common_R, 0)
        self._common_L[column] += common_R.sum()
        self._exact_L[column] += (common_R == self._map.top_k).sum()

    def _new_tally(self, routes: MicrobatchRoutes) -> _Tally:
        passes = {
            phase: _PassTally(hits=[0] * len(self._map.sites), digest_L=torch.zeros_like(routes.digest_L))
            for phase in PASSES
        }
        return _Tally(routes=routes, passes=passes)

    def _count_faults(self, recompute: bool) -> list[_Fault]:
        faults = []
        for key, tally in self._tallies.items():
            for phase in PASSES:
                due = _due(tally, phase, recompute)
                for layer, hits in zip(self._map.layers, tally.passes[phase].hits, strict=True):
                    if hits != due:
                        what = f"replayed {hits} time(s), expected {due}"
                        faults.append(_Fault(key=key, layer=layer, phase=phase, what=what))
        return faults

    def _wrong_digests(self, recompute: bool) -> Tensor:
        """bool [tallies, passes, layers]: the count is right and the ids are not those of the trace."""
        rows = []
        for tally in self._tallies.values():
            for phase in PASSES:
                seen, due = tally.passes[phase], _due(tally, phase, recompute)
                counted_L = torch.tensor([hits == due for hits in seen.hits], device=self._device)
                rows.append(counted_L & (seen.digest_L != tally.routes.digest_L * due))
        shape = (len(self._tallies), len(PASSES), len(self._map.sites))
        empty = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return torch.stack(rows).reshape(shape) if rows else empty

    def _digest_faults(self, wrong_TPL: Tensor) -> list[_Fault]:
        keys = tuple(self._tallies)
        return [
            _Fault(
                key=keys[tally],
                layer=self._map.layers[column],
                phase=PASSES[phase],
                what="the ids in use were not those of the trace",
            )
            for tally, phase, column in wrong_TPL.nonzero().tolist()
        ]

    def _totals(self) -> RoutingTotals:
        tallies = [(tally.routes, tally.due["forward"]) for tally in self._tallies.values()]
        return RoutingTotals(
            num_valid=sum(routes.num_valid * times for routes, times in tallies),
            num_tokens=sum(routes.num_tokens * times for routes, times in tallies),
            num_unfed=sum(routes.num_unfed * times for routes, times in tallies),
            common_L=self._common_L,
            exact_L=self._exact_L,
            conflicts_L=self._conflicts_L,
        )


def _due(tally: _Tally, phase: Pass, recompute: bool) -> int:
    return tally.due[phase] if phase == "forward" or recompute else 0


def _shortfall(faults: list[_Fault], num_faults: int) -> CheckError:
    where = str(faults[0]) if faults else "on another rank, whose own message names the layer"
    return CheckError(
        "routing-ledger",
        f"replay fell short in {num_faults} place(s) over all ranks; nothing was stepped",
        where if len(faults) < 2 else f"first {where}; last {faults[-1]}",
        "leave the routers' forward alone after the hooks are on, checkpoint with the session's context_fn, "
        "and enter each microbatch once per forward pass",
    )
