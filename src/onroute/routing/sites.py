"""Where a model chooses its experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSite:
    """One router: the call of top-k, inside the forward of one module, that picks the experts.

    layer: index in the decoder stack, dense layers counted.
    module_name: the module, within the model, in whose forward the call happens.
    ordinal: how many calls of top-k precede it in that forward; a grouped router first picks groups.
    experts_name: the module that is handed the choice; empty when it is not known.
    """

    layer: int
    module_name: str
    ordinal: int
    num_experts: int
    top_k: int
    experts_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingMap:
    """All routers of a model. The position of a site in `sites` is its column in a `RoutingTrace`.

    sites: in the order of the forward pass, so ascending by layer; a layer that routes in its attention
        too has two. At least one, all with the same number of experts and top-k.
    outside: modules that route outside the decoder stack, such as multi-token prediction; they
        always use their live router.
    live: modules in the stack that choose something else by top-k, such as the tokens of a sparse attention;
        they always choose by themselves.
    """

    sites: tuple[RoutingSite, ...]
    outside: tuple[str, ...] = ()
    live: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(site.layer for site in self.sites)

    @property
    def num_experts(self) -> int:
        return self.sites[0].num_experts

    @property
    def top_k(self) -> int:
        return self.sites[0].top_k

    @property
    def signature(self) -> tuple[tuple[int, ...], int, int]:
        """(layers, num_experts, top_k): equal on both sides when routes of one fit the other."""
        return self.layers, self.num_experts, self.top_k
