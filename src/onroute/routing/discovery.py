"""Finds the routers of a model by what they do, not by what they are called.

One forward pass is watched. A router is a call of top-k whose indices another module, one with
parameters and in the same decoder layer, then receives as an integer argument: its experts. The
group choice of a grouped router and the token choice of a sparse attention never travel that way.
A router that hands its choice on as a mask or renumbered is known by its weights: they score the experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PretrainedConfig

from onroute.core.errors import UserError
from onroute.routing.dense import dense_model_error, expert_count
from onroute.routing.observation import Observation, TopKEvent, observe
from onroute.routing.sites import RoutingMap, RoutingSite


def discover(model: nn.Module, forward: Callable[[], object]) -> RoutingMap:
    """The routers of `model`, found while `forward` runs it once, without gradients.

    model: any Hugging Face causal language model, plain or sharded; `model.config` gives the
        number of decoder layers.

    Raises:
        UserError: the model is dense; or experts are held by a layer whose router was not found;
            or the routers disagree about the number of experts or of experts per token; or a router
            runs more than once in a forward pass. Replay can then not be proved.
    """
    with torch.no_grad():
        seen = observe(model, forward)
    events = _route_events(seen)
    stack_name, stack = _find_stack(model, [seen.names[event.module] for event in events])

    def owner(module: nn.Module) -> int | None:
        return _layer_index(seen.names[module], stack_name)

    events = [event for event in events if owner(event.module) == owner(event.sink)]
    outside = sorted({seen.names[event.module] for event in events if owner(event.module) is None})
    placed = [(layer, event) for event in events if (layer := owner(event.module)) is not None]
    placed += _scored(model, stack, seen, owner, {layer for layer, _ in placed})
    if not placed:
        raise _nothing_found(model, stack)
    sites = [_site(layer, event, seen) for layer, event in placed]
    sites.sort(key=lambda site: site.layer)
    _refuse_repeated(sites)
    _refuse_mixed(sites)
    _refuse_missing(model, stack, sites)
    routers = {site.module_name for site in sites}
    choosing = {seen.names[event.module] for event in seen.top_k if owner(event.module) is not None}
    return RoutingMap(sites=tuple(sites), outside=tuple(outside), live=tuple(sorted(choosing - routers)))


def decoder_stack_name(model: nn.Module) -> str:
    """Name of the list of decoder layers of `model`, found by structure: of the lists with
    `num_hidden_layers` entries, the one that holds most parameters.

    Raises:
        UserError: the model has no list of modules at all.
    """
    return _find_stack(model, ())[0]


def decoder_stack(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers itself, see `decoder_stack_name`."""
    return _find_stack(model, ())[1]


def holds_experts(layer: nn.Module, num_experts: int) -> bool:
    """Whether a decoder layer holds expert weights: stacked in one parameter, or a module each."""
    for module in layer.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_experts:
            return True
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            continue
        if any(p.ndim >= 3 and p.shape[0] == num_experts for p in module.parameters(recurse=False)):
            return True
    return False


def _route_events(seen: Observation) -> list[TopKEvent]:
    """Every top-k whose indices a later module received, each with that module.

    The last match wins: a group choice can happen to equal the choice of experts.
    """
    found: dict[int, TopKEvent] = {}
    for received in seen.received:
        for position in range(received.after_top_k - 1, -1, -1):
            event = seen.top_k[position]
            if event.module is not received.module and event.fits(received.ids):
                found.setdefault(position, event.given_to(received.module))
                break
    return [found[position] for position in sorted(found)]


def _scored(
    model: nn.Module,
    stack: nn.ModuleList,
    seen: Observation,
    owner: Callable[[nn.Module], int | None],
    found: set[int],
) -> list[tuple[int, TopKEvent]]:
    """Routers that hand their choice on in another form: in layers with experts and no router yet, every
    top-k over as many scores as its module's own weights make, at least one for each expert.
    """
    count = expert_count(model.config)
    if count is None:
        return []
    open_layers = {i for i, layer in enumerate(stack) if i not in found and holds_experts(layer, count)}
    return [
        (layer, event)
        for event in seen.top_k
        if (layer := owner(event.module)) in open_layers
        and layer is not None
        and event.width >= count
        and any(p.ndim == 2 and event.width in p.shape for p in event.module.parameters())
    ]


def _find_stack(model: nn.Module, router_names: Sequence[str]) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers: it has `num_hidden_layers` entries and, of several such lists,
    holds most routers, then most parameters. Some models count sub-layers: then any length does.
    """
    depth = _text_config(model).num_hidden_layers
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    candidates = [entry for entry in lists if len(entry[1]) == depth] or lists
    if not candidates:
        raise UserError(
            "routing-no-stack",
            "the model has no list of decoder layers",
            type(model).__name__,
            "train a model of a Hugging Face decoder family",
        )

    def weight(entry: tuple[str, nn.ModuleList]) -> tuple[int, int]:
        routers = sum(router.startswith(f"{entry[0]}.") for router in router_names)
        return routers, sum(p.numel() for p in entry[1].parameters())

    # max keeps the first of equals, and outer modules come first.
    return max(candidates, key=weight)


def _text_config(model: nn.Module) -> PretrainedConfig:
    config = model.config
    assert isinstance(config, PretrainedConfig)
    return config.get_text_config(decoder=True)


def _layer_index(module_name: str, stack_name: str) -> int | None:
    """Index of the decoder layer that holds the module of this name, or None outside the stack."""
    prefix = f"{stack_name}."
    return int(module_name.removeprefix(prefix).split(".")[0]) if module_name.startswith(prefix) else None


def _site(layer: int, event: TopKEvent, seen: Observation) -> RoutingSite:
    name = seen.names[event.module]
    if not event.over_last_axis:
        raise UserError(
            "routing-axis",
            f"router {name!r} chooses along an axis that is not the last",
            f"layer {layer}",
            'set routing.replay = "off": this router cannot be replayed',
        )
    return RoutingSite(
        layer=layer,
        module_name=name,
        ordinal=event.ordinal,
        num_experts=event.width,
        top_k=event.ids.shape[-1],
        experts_name=seen.names[event.sink],
    )


def _refuse_repeated(sites: Sequence[RoutingSite]) -> None:
    repeated = [name for name, times in Counter(site.module_name for site in sites).items() if times > 1]
    if repeated:
        raise UserError(
            "routing-repeated",
            f"{len(repeated)} router(s) choose experts more than once in a forward pass",
            f"modules {_listing(repeated)}",
            'set routing.replay = "off": a trace holds one choice per token and router',
        )


def _refuse_mixed(sites: Sequence[RoutingSite]) -> None:
    first_of_kind: dict[tuple[int, int], RoutingSite] = {}
    for site in sites:
        first_of_kind.setdefault((site.num_experts, site.top_k), site)
    if len(first_of_kind) > 1:
        raise UserError(
            "routing-mixed",
            "the routers disagree about experts and experts per token",
            "; ".join(
                f"{s.module_name!r}: {s.num_experts} experts, top {s.top_k}" for s in first_of_kind.values()
            ),
            'set routing.replay = "off": a trace has one width for all layers',
        )


def _refuse_missing(model: nn.Module, stack: nn.ModuleList, sites: Sequence[RoutingSite]) -> None:
    found = {site.layer for site in sites}
    num_experts = sites[0].num_experts
    missing = [i for i, layer in enumerate(stack) if i not in found and holds_experts(layer, num_experts)]
    if missing:
        raise _unprovable(model, missing)


def _nothing_found(model: nn.Module, stack: nn.ModuleList) -> UserError:
    count = expert_count(model.config)
    if count is None:
        return dense_model_error(type(model).__name__)
    return _unprovable(model, [i for i, layer in enumerate(stack) if holds_experts(layer, count)])


def _unprovable(model: nn.Module, layers: Sequence[int]) -> UserError:
    return UserError(
        "routing-layers",
        f"{len(layers) or 'some'} decoder layer(s) hold experts, but no top-k was seen that picks them",
        f"{type(model).__name__}, layers {_listing(layers) or 'unknown'}",
        'replay cannot be proved for this model: set routing.replay = "off" to train it on the live router',
    )


def _listing(items: Sequence[object], limit: int = 20) -> str:
    shown = ", ".join(map(str, items[:limit]))
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
