"""How replay went, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onroute.routing.sites import RoutingMap


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTotals:
    """Sums over forward passes, of one rank or of all.

    num_valid: rows replayed. num_tokens: real tokens. num_unfed: of those, last tokens without a route.
    common_L: float64, sum over replayed rows of |live ∩ replayed|, per layer.
    exact_L: float64, replayed rows whose live choice was the same set, per layer.
    conflicts_L: float64, replayed rows with an expert that the live router had masked away, per layer.
    """

    num_valid: int
    num_tokens: int
    num_unfed: int
    common_L: Tensor
    exact_L: Tensor
    conflicts_L: Tensor

    def to_tensor(self, device: torch.device) -> Tensor:
        """float64 [3 + 3 * num_layers] on the device, to be summed over ranks."""
        counts = torch.tensor([self.num_valid, self.num_tokens, self.num_unfed], dtype=torch.float64)
        return torch.cat([counts.to(device), self.common_L, self.exact_L, self.conflicts_L])

    @classmethod
    def from_tensor(cls, packed: Tensor) -> RoutingTotals:
        common_L, exact_L, conflicts_L = packed[3:].chunk(3)
        return cls(
            num_valid=int(packed[0]),
            num_tokens=int(packed[1]),
            num_unfed=int(packed[2]),
            common_L=common_L,
            exact_L=exact_L,
            conflicts_L=conflicts_L,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingMetrics:
    """Shares between 0 and 1 over all ranks; None where nothing was replayed.

    agreement: mean of |live ∩ replayed| / top_k over replayed rows and layers.
    agreement_worst_layer: the same, of the layer `worst_layer` alone.
    agreement_by_layer: the same, of every MoE layer in order; empty where nothing was replayed.
    exact_rows: share of (row, layer) whose live choice was the replayed set.
    group_conflict: share of (row, layer) that replays an expert which the live router had masked away,
        such as one outside its live groups; it keeps its true weight. 0 for routers that mask nothing.
    live_rows: share of real tokens that the live router served.
    replayed_share: share of real tokens that were replayed, the never fed last tokens not counted.
    """

    agreement: float | None
    agreement_worst_layer: float | None
    worst_layer: int | None
    agreement_by_layer: tuple[float, ...]
    exact_rows: float | None
    group_conflict: float | None
    live_rows: float | None
    replayed_share: float | None

    @classmethod
    def of(cls, totals: RoutingTotals, routing_map: RoutingMap) -> RoutingMetrics:
        agreed_L = (totals.common_L / routing_map.top_k).tolist()
        worst = min(range(len(agreed_L)), key=agreed_L.__getitem__)
        pairs = totals.num_valid * len(agreed_L)
        return cls(
            agreement=_share(sum(agreed_L), pairs),
            agreement_worst_layer=_share(agreed_L[worst], totals.num_valid),
            worst_layer=routing_map.layers[worst] if pairs else None,
            agreement_by_layer=tuple(agreed / totals.num_valid for agreed in agreed_L) if pairs else (),
            exact_rows=_share(float(totals.exact_L.sum()), pairs),
            group_conflict=_share(float(totals.conflicts_L.sum()), pairs),
            live_rows=_share(totals.num_tokens - totals.num_valid, totals.num_tokens),
            replayed_share=_share(totals.num_valid, totals.num_tokens - totals.num_unfed),
        )

    def published(self) -> dict[str, float]:
        """The metrics that have a value, under the names they are logged with."""
        values = {
            "routing/agreement": self.agreement,
            "routing/agreement_worst_layer": self.agreement_worst_layer,
            "routing/exact_rows": self.exact_rows,
            "routing/group_conflict": self.group_conflict,
            "routing/live_rows": self.live_rows,
            "routing/replayed_share": self.replayed_share,
        }
        return {name: value for name, value in values.items() if value is not None}


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None
