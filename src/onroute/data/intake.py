"""Rollouts are checked here, once, before anything is learned from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onroute.core.errors import CheckError
from onroute.core.samples import Group, Sample
from onroute.data.validate import check_group
from onroute.routing.validation import validate_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """What every trace must look like: the routers of the model that samples or trains."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int


def check_rollouts(groups: Iterable[Group], *, context_length: int, routes: RouteShape | None) -> None:
    """Check groups, samples and, where `routes` is given, that every sample brought a fitting route.

    Raises CheckError or UserError naming the sample that breaks a promise.
    """
    for group in groups:
        check_group(group, context_length=context_length)
        if routes is not None:
            for sample in group.samples:
                _check_route(sample, routes)


def _check_route(sample: Sample, routes: RouteShape) -> None:
    if sample.routing is None:
        raise CheckError(
            "routing-missing",
            "the sample came without routes",
            f"sample {sample.id}",
            "see that the engine captures routes for every request",
        )
    validate_trace(
        sample.routing,
        num_tokens=sample.num_tokens,
        layers=routes.layers,
        num_experts=routes.num_experts,
        top_k=routes.top_k,
        sample_id=sample.id,
        tokens=sample.tokens,
    )
