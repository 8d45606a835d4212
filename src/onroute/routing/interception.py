"""Takes part in the choice of experts, inside the router's own forward.

Only the choice is replaced. The scores, what the router makes of them, and the gradients are the
model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onroute.core.errors import CheckError, UserError
from onroute.routing.sites import RoutingMap, RoutingSite
from onroute.routing.topk import MASKS, TOP_K, TopKCall, TorchFunction, masked_source

_MARK = "onroute_router_hook"


class RouteHandler(Protocol):
    """Is asked once for every choice that a router makes."""

    def choose(self, column: int, live_ids: Tensor, masked: Tensor | None) -> Tensor | None:
        """The experts to use, or None for the router's own.

        column: position of the router in `RoutingMap.sites`.
        live_ids: int64 [rows, top_k] the router's own choice; rows are the flattened tokens of the
            forward. The answer has the same shape and type.
        masked: bool [rows, num_experts], the experts that the router had taken out of its choice, such as
            those outside its live groups; None when it masks nothing.
        """
        ...


class _RouterMode(TorchFunctionMode):
    """Active during one forward of one router."""

    def __init__(self, site: RoutingSite, column: int, handler: RouteHandler) -> None:
        super().__init__()
        self._site, self._column, self._handler = site, column, handler
        self._top_k_calls = 0
        self._unmasked: dict[int, tuple[Tensor, Tensor]] = {}
        """id of a masked tensor -> (it, so that its id stays taken; the tensor before the mask)."""

    def __torch_function__(
        self,
        func: TorchFunction,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        out: Any = func(*args, **kwargs)
        if func in TOP_K:
            self._top_k_calls += 1
            if self._top_k_calls - 1 == self._site.ordinal:
                return self._decide(TopKCall.parse(args, kwargs).scores, out)
        elif func in MASKS and isinstance(out, Tensor):
            source = masked_source(func, args, kwargs, out)
            if source is not None:
                self._unmasked[id(out)] = (out, self._before_masks(source))
        return out

    def _before_masks(self, scores: Tensor) -> Tensor:
        return self._unmasked.get(id(scores), (scores, scores))[1]

    def _decide(self, scores: Tensor, live: torch.return_types.topk) -> torch.return_types.topk:
        live_values, live_ids = live
        flat_ids = live_ids.reshape(-1, live_ids.shape[-1])
        source = self._before_masks(scores)
        is_masked = source is not scores
        masked = (source != scores).reshape(-1, scores.shape[-1]) if is_masked else None
        chosen = self._handler.choose(self._column, flat_ids, masked)
        if chosen is None:
            return live
        ids = chosen.reshape(live_ids.shape)
        values = source.gather(-1, ids)
        if is_masked:
            # With fewer than top_k experts left, the live choice holds a masked one; its weight stays masked.
            is_live = (ids == live_ids).all(dim=-1, keepdim=True)
            values = torch.where(is_live, live_values, values)
        return torch.return_types.topk((values, ids))


class RouterHooks:
    """Hooks on the routers of one model, idle until `using`.

    The handler is held by this object alone, so that a recompute on autograd's own thread finds it.

    Raises:
        UserError: a module of the map is not in the model, or the model runs hub kernels.
        CheckError: a router carries hooks already.
    """

    def __init__(self, model: nn.Module, routing_map: RoutingMap) -> None:
        _refuse_hub_kernels(model)
        self.map = routing_map
        self._handler: RouteHandler | None = None
        self._installed: list[tuple[nn.Module, Callable[..., object] | None]] = []
        modules = [_find(model, site) for site in routing_map.sites]
        for column, (site, module) in enumerate(zip(routing_map.sites, modules, strict=True)):
            self._install(column, site, module)
        names = dict.fromkeys(
            n for site in routing_map.sites for n in (site.module_name, site.experts_name) if n
        )
        watched = [(name, model.get_submodule(name)) for name in names]
        self._watched = [(name, module, _way_through(module)) for name, module in watched]

    @contextmanager
    def using(self, handler: RouteHandler | None) -> Iterator[None]:
        """Ask `handler` within this context; None leaves the routers alone."""
        before, self._handler = self._handler, handler
        try:
            yield
        finally:
            self._handler = before

    def require_untouched(self) -> None:
        """Raises CheckError when a router or its experts were patched or hooked since the hooks went on:
        what the router hands on might then no longer be what it was given."""
        for name, module, before in self._watched:
            if _way_through(module) != before:
                raise CheckError(
                    "routing-patched",
                    f"module {name!r} was patched or hooked after replay was installed",
                    "before the forward pass",
                    'change the model before the trainer is built, or set routing.replay = "off"',
                )

    def remove(self) -> None:
        """Give every router its stock forward back."""
        while self._installed:
            module, before = self._installed.pop()
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before

    def _install(self, column: int, site: RoutingSite, module: nn.Module) -> None:
        before: Callable[..., object] | None = module.__dict__.get("forward")

        def forward(self_: nn.Module, *args: object, **kwargs: object) -> object:
            handler = self._handler
            # Looked up at call time: sharding changes the class, and a copied module must not run its origin.
            stock = before or MethodType(type(self_).forward, self_)
            if handler is None:
                return stock(*args, **kwargs)
            with _RouterMode(site, column, handler):
                return stock(*args, **kwargs)

        # A compiled layer runs its router as it is: what the hook answers is not known when it is traced.
        hook: Callable[..., object] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
        setattr(hook, _MARK, True)
        module.__dict__["forward"] = MethodType(hook, module)
        self._installed.append((module, before))


def _refuse_hub_kernels(model: nn.Module) -> None:
    if getattr(model, "use_kernels", False):
        raise UserError(
            "routing-kernels",
            "the model runs hub kernels: train() and eval() put them where replay has put its own",
            type(model).__name__,
            "load it with use_kernels=False",
        )


def _way_through(module: nn.Module) -> tuple[object, ...]:
    """All that a call of the module runs: its own forward, its class's, and its hooks."""
    return (
        module.__dict__.get("forward"),
        type(module).forward,
        tuple(module._forward_pre_hooks.values()),
        tuple(module._forward_hooks.values()),
    )


def _find(model: nn.Module, site: RoutingSite) -> nn.Module:
    try:
        module = model.get_submodule(site.module_name)
    except AttributeError:
        raise UserError(
            "routing-module-missing",
            f"the model has no module {site.module_name!r}",
            f"layer {site.layer}",
            "discover the routers on this very model, after it is wrapped",
        ) from None
    if hasattr(module.__dict__.get("forward"), _MARK):
        raise CheckError(
            "routing-hooked-twice",
            f"router {site.module_name!r} carries routing hooks already",
            f"layer {site.layer}",
            "remove() the other RouterHooks first; one model has one set",
        )
    return module
