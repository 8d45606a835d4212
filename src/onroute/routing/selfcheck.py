"""Proves on a few tokens that replay works on this model, before it is trained."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from onroute.core.batches import TokenSpan
from onroute.core.errors import CheckError
from onroute.routing.capture import RouteRecorder, trace_of
from onroute.routing.discovery import decoder_stack, holds_experts
from onroute.routing.interception import RouterHooks
from onroute.routing.session import ReplaySession
from onroute.routing.sites import RoutingMap

CheckName: TypeAlias = Literal[
    "layers_found", "self_replay_bitwise", "permutation_changes_logits", "router_gradient", "recompute"
]
Checkpointing: TypeAlias = Callable[[bool], AbstractContextManager[None]]
"""Switches activation checkpointing, with the session's `context_fn`, on or off for a context."""
RouterGradients: TypeAlias = dict[str, list[Tensor | None]]
"""Name of the router -> gradients of its trained weights, None where there is none."""

_KEY: Final = "self-check"
_TINIEST: Final = 1e-30
_EPSILONS: Final = 64
"""Recompute may differ by so many units of rounding: kernels of the backward pass may add in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    name: CheckName
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckReport:
    """One row a check, in the order they ran."""

    map: RoutingMap
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def require(self) -> None:
        """Raises CheckError that names every check that failed."""
        failed = [row for row in self.rows if not row.passed]
        if failed:
            raise CheckError(
                "routing-self-check",
                f"{len(failed)} of {len(self.rows)} checks of replay failed on this model",
                "; ".join(f"{row.name}: {row.detail}" for row in failed),
                'train it with routing.replay = "off", or report the model type',
            )


def self_check(
    model: nn.Module,
    hooks: RouterHooks,
    session: ReplaySession,
    *,
    forward: Callable[[], Tensor],
    checkpointing: Checkpointing | None,
    engine_layers: Sequence[int] | None = None,
) -> SelfCheckReport:
    """Run the proofs. Weights, gradients, modes and random generators are left as they were.

    hooks, session: of this very model; the session must hold nothing.
    forward: runs the model on a few tokens, the same every time, and returns its logits [..., V].
    checkpointing: None when the layers cannot be recomputed; that row is then absent.
    engine_layers: decoder layers that the rollout engine reports routes for, when there is one.
    """
    probe = _Probe(model, hooks, session, forward, checkpointing or (lambda _: nullcontext()))
    with _restored(model):
        rows = [_layers_found(model, hooks.map, engine_layers)]
        bitwise, ids_LRK = probe.replays_itself()
        rows.append(bitwise)
        shifted = (ids_LRK + 1) % hooks.map.num_experts
        rows.append(probe.permutation_matters(ids_LRK, shifted))
        row, gradients = probe.router_gets_gradient(shifted)
        rows.append(row)
        if checkpointing is not None:
            rows.append(probe.recompute_agrees(shifted, gradients))
    return SelfCheckReport(map=hooks.map, rows=tuple(rows))


def _layers_found(model: nn.Module, routing_map: RoutingMap, engine_layers: Sequence[int] | None) -> CheckRow:
    stack = decoder_stack(model)
    holding = [i for i, layer in enumerate(stack) if holds_experts(layer, routing_map.num_experts)]
    missing = sorted(set(holding) - set(routing_map.layers))
    agreed = engine_layers is None or tuple(engine_layers) == routing_map.layers
    detail = f"{len(routing_map.layers)} routers in {len(stack)} decoder layers"
    if missing:
        detail += f", none in layers {missing}, which hold experts"
    if not agreed:
        detail += f", the engine reports layers {engine_layers}, the model has {routing_map.layers}"
    if routing_map.outside:
        detail += f", left live outside the stack: {', '.join(routing_map.outside)}"
    if routing_map.live:
        detail += f", left live in the stack: {', '.join(_kinds(routing_map.live))}"
    return CheckRow(name="layers_found", passed=not missing and agreed, detail=detail)


def _kinds(module_names: Sequence[str]) -> list[str]:
    """Names with the number of the layer left open, each once: `model.layers.*.self_attn.indexer`."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in module_names))


class _Probe:
    def __init__(
        self,
        model: nn.Module,
        hooks: RouterHooks,
        session: ReplaySession,
        forward: Callable[[], Tensor],
        checkpointing: Checkpointing,
    ) -> None:
        self._model, self._hooks, self._session = model, hooks, session
        self._forward, self._checkpointing = forward, checkpointing

    @torch.no_grad()
    def replays_itself(self) -> tuple[CheckRow, Tensor]:
        """Also gives the recorded ids [num_layers, rows, top_k]."""
        self._model.train(False)
        with self._hooks.using(None):
            stock = self._forward()
        with RouteRecorder(self._hooks).recording() as record:
            recorded = self._forward()
        with self._replaying(record.ids, recompute=False):
            replayed = self._replayed_logits()
        passed = torch.equal(stock, recorded) and torch.equal(stock, replayed)
        detail = (
            f"max |difference| recorded {_gap(stock, recorded):.1e}, replayed {_gap(stock, replayed):.1e}"
        )
        if not passed:
            with self._hooks.using(None):
                detail += f"; two stock passes differ by {_gap(stock, self._forward()):.1e}"
        return CheckRow(name="self_replay_bitwise", passed=passed, detail=detail), record.ids

    @torch.no_grad()
    def permutation_matters(self, ids_LRK: Tensor, shifted_LRK: Tensor) -> CheckRow:
        self._model.train(False)
        logits = []
        for ids in (ids_LRK, shifted_LRK):
            with self._replaying(ids, recompute=False):
                logits.append(self._replayed_logits())
        gap = _gap(*logits)
        finite = bool(torch.isfinite(logits[1]).all())
        detail = f"max |difference| {gap:.1e}" + ("" if finite else ", logits are not finite")
        return CheckRow(name="permutation_changes_logits", passed=finite and gap > 0, detail=detail)

    def router_gets_gradient(self, ids_LRK: Tensor) -> tuple[CheckRow, RouterGradients]:
        gradients = self._router_gradients(ids_LRK, checkpointed=False)
        trained = {name: grads for name, grads in gradients.items() if grads}
        dead = [name for name, grads in trained.items() if not _alive(grads)]
        detail = f"{len(trained) - len(dead)} of {len(trained)} routers get a finite, non-zero gradient"
        if len(trained) < len(gradients):
            detail += f"; {len(gradients) - len(trained)} frozen"
        if dead:
            detail += f"; not {', '.join(dead)}"
        return CheckRow(name="router_gradient", passed=not dead, detail=detail), gradients

    def recompute_agrees(self, ids_LRK: Tensor, plain: RouterGradients) -> CheckRow:
        try:
            recomputed = self._router_gradients(ids_LRK, checkpointed=True)
        except CheckError as error:
            return CheckRow(name="recompute", passed=False, detail=str(error))
        pairs = [
            (a, b)
            for name in plain
            for a, b in zip(plain[name], recomputed[name], strict=True)
            if a is not None and b is not None
        ]
        worst = max((_gap(a, b) / max(float(a.abs().max()), _TINIEST) for a, b in pairs), default=0.0)
        limit = max((_EPSILONS * torch.finfo(a.dtype).eps for a, _ in pairs), default=0.0)
        detail = f"router gradients differ by at most {worst:.1e} of their size (limit {limit:.1e})"
        return CheckRow(name="recompute", passed=worst <= limit, detail=detail)

    def _router_gradients(self, ids_LRK: Tensor, *, checkpointed: bool) -> RouterGradients:
        self._model.train(True)
        with self._checkpointing(checkpointed), self._replaying(ids_LRK, recompute=checkpointed):
            torch.manual_seed(0)  # the same dropout in both runs
            logits = self._replayed_logits()
            torch.autograd.backward(logits.float().log_softmax(dim=-1)[..., 0].mean())
        gradients = {
            site.module_name: [
                _whole(p.grad) for p in _router_weights(self._model, site.module_name, site.num_experts)
            ]
            for site in self._hooks.map.sites
        }
        for parameter in self._model.parameters():
            parameter.grad = None
        return gradients

    @contextmanager
    def _replaying(self, ids_LRK: Tensor, *, recompute: bool) -> Iterator[None]:
        """These ids are bound in the body; after it the ledger must agree."""
        rows = ids_LRK.shape[1]
        trace = trace_of(ids_LRK, self._hooks.map, num_tokens=rows)
        with self._hooks.using(self._session), self._session.holding({0: trace}):
            self._session.bind(_KEY, [TokenSpan(sample=0, offset=0, length=rows)], rows)
            yield
            self._session.settle(recompute=recompute)

    def _replayed_logits(self) -> Tensor:
        with self._session.microbatch(_KEY):
            return self._forward()


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Puts gradients, the mode of every module and the random generators back."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p, _ in gradients if p.device.type == "cuda"})
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


def _router_weights(model: nn.Module, module_name: str, num_experts: int) -> list[nn.Parameter]:
    """Trainable parameters that score the experts: at most a matrix, one side of it num_experts long."""
    own = [p for p in model.get_submodule(module_name).parameters() if p.requires_grad]
    return [p for p in own if p.ndim <= 2 and num_experts in p.shape] or own


def _whole(gradient: Tensor | None) -> Tensor | None:
    """The gradient itself, gathered when the parameter is sharded (a collective)."""
    gather = getattr(gradient, "full_tensor", None)
    whole = gradient if gather is None else gather()
    return None if whole is None else whole.detach().clone()


def _alive(gradients: Sequence[Tensor | None]) -> bool:
    return all(g is not None and bool(torch.isfinite(g).all()) and bool(g.any()) for g in gradients)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())
