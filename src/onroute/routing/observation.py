"""Watches one forward pass: every call of top-k, and which module was handed integers after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onroute.routing.topk import TOP_K, TopKCall, TorchFunction

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKEvent:
    """One call of top-k. `sink` is the module that later received its indices, else `module` itself.

    ordinal: calls before it within this run of `module`, those of its children included.
    ids: [..., k] the indices; width: how many there were to choose from.
    """

    module: nn.Module
    sink: nn.Module
    ordinal: int
    ids: Tensor
    width: int
    over_last_axis: bool

    def fits(self, received: Tensor) -> bool:
        """Whether `received` [..., k] holds these indices."""
        k = self.ids.shape[-1]
        if received.shape[-1] != k or received.numel() != self.ids.numel():
            return False
        return torch.equal(received.reshape(-1, k).long(), self.ids.reshape(-1, k))

    def given_to(self, sink: nn.Module) -> TopKEvent:
        return replace(self, sink=sink)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """`module` was called with integers after `after_top_k` calls of top-k."""

    module: nn.Module
    ids: Tensor
    after_top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    names: Mapping[nn.Module, str]
    top_k: list[TopKEvent] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    module: nn.Module
    top_k_calls: int = 0


class _Watch(TorchFunctionMode):
    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.seen = Observation(names=names)
        self._running: list[_Running] = []

    def __torch_function__(
        self,
        func: TorchFunction,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        out: Any = func(*args, **kwargs)
        if func in TOP_K and self._running:
            self._note(TopKCall.parse(args, kwargs), out[1])
        return out

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._running.append(_Running(module))
        if isinstance(module, nn.Embedding) or next(module.parameters(), None) is None:
            return
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dtype in _INTEGERS and value.ndim > 1:
                event = Received(module=module, ids=value.detach(), after_top_k=len(self.seen.top_k))
                self.seen.received.append(event)

    def leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._running.pop()

    def _note(self, call: TopKCall, ids: Tensor) -> None:
        here = self._running[-1]
        event = TopKEvent(
            module=here.module,
            sink=here.module,
            ordinal=here.top_k_calls,
            ids=ids.detach(),
            width=call.scores.shape[call.axis],
            over_last_axis=call.over_last_axis,
        )
        self.seen.top_k.append(event)
        for running in self._running:
            running.top_k_calls += 1


def observe(model: nn.Module, forward: Callable[[], object]) -> Observation:
    """Run `forward` once and tell what was seen. The model carries no hook afterwards, whatever happens."""
    watch = _Watch({module: name for name, module in model.named_modules()})
    with ExitStack() as hooks:
        for module in model.modules():
            before = module.register_forward_pre_hook(watch.enter, with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(module.register_forward_hook(watch.leave).remove)
        with watch:
            forward()
    return watch.seen
