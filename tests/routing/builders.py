"""Small real models with hooks on their routers, and traces that no router would choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from onroute.core.batches import TokenSpan
from onroute.core.routing import RoutingTrace, expert_dtype
from onroute.models.tiny import tiny_config, tiny_model
from onroute.routing.discovery import decoder_stack, discover
from onroute.routing.interception import RouterHooks
from onroute.routing.session import ReplaySession
from onroute.routing.sites import RoutingMap, RoutingSite

CPU = torch.device("cpu")
VOCABULARY = 128


def token_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: PreTrainedModel, input_ids: Tensor, **inputs: Any) -> Tensor:
    return model(input_ids=input_ids, use_cache=False, **inputs).logits


def build(model_type: str = "qwen3_moe", **changes: Any) -> PreTrainedModel:
    return tiny_model(model_type, config=tiny_config(model_type, **changes))


def routers_of(model: PreTrainedModel) -> RoutingMap:
    return discover(model, lambda: logits_of(model, token_ids(2, 7)))


def flat_map(layers: Sequence[int], num_experts: int = 8, top_k: int = 2) -> RoutingMap:
    """A map of routers that no model needs to have."""
    return RoutingMap(
        sites=tuple(
            RoutingSite(layer=i, module_name=f"layers.{i}", ordinal=0, num_experts=num_experts, top_k=top_k)
            for i in layers
        )
    )


def random_trace(
    routing_map: RoutingMap, num_tokens: int, *, seed: int = 0, last_valid: bool = False
) -> RoutingTrace:
    """Distinct experts for every token and layer; the last row is invalid unless said otherwise."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, len(routing_map.sites), routing_map.num_experts)
    experts = rng.random(shape).argsort(axis=-1)[..., : routing_map.top_k]
    valid = np.ones(num_tokens, dtype=np.bool_)
    valid[-1] = last_valid
    return RoutingTrace(
        experts=experts.astype(expert_dtype(routing_map.num_experts)),
        layers=routing_map.layers,
        num_experts=routing_map.num_experts,
        valid=valid,
    )


def one_span(length: int, sample: int = 0, offset: int = 0) -> list[TokenSpan]:
    return [TokenSpan(sample=sample, offset=offset, length=length)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """A model under replay."""

    model: PreTrainedModel
    hooks: RouterHooks
    session: ReplaySession

    @property
    def map(self) -> RoutingMap:
        return self.hooks.map

    def trace(self, num_tokens: int, seed: int = 0, *, last_valid: bool = False) -> RoutingTrace:
        return random_trace(self.map, num_tokens, seed=seed, last_valid=last_valid)

    def checkpointing(self, enabled: bool) -> AbstractContextManager[None]:
        return checkpointed(
            self.model, partial(checkpoint, use_reentrant=False, context_fn=self.session.context_fn), enabled
        )


@contextmanager
def checkpointed(model: PreTrainedModel, function: Any, enabled: bool = True) -> Iterator[None]:
    layers: list[Any] = list(decoder_stack(model))
    for layer in layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = enabled, function
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = False


@contextmanager
def rigged(model: PreTrainedModel) -> Iterator[Rig]:
    """The model with hooks that ask a session; stock again afterwards."""
    hooks = RouterHooks(model, routers_of(model))
    session = ReplaySession(hooks.map, CPU)
    try:
        with hooks.using(session):
            yield Rig(model=model, hooks=hooks, session=session)
    finally:
        hooks.remove()


@contextmanager
def watched_choices(rig: Rig) -> Iterator[list[Tensor]]:
    """Ids [rows, top_k] that each router's module hands to the experts, in the order of the calls."""
    seen: list[Tensor] = []
    handles = [
        rig.model.get_submodule(site.module_name).register_forward_hook(
            lambda module, args, output: seen.append(output[2].detach())
        )
        for site in rig.map.sites
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
