"""Activation checkpointing of the decoder layers, non-reentrant, with the caller's own contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from onroute.core.errors import UserError
from onroute.routing.discovery import decoder_stack

ContextFn: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Called in a layer's forward pass; gives the context of that pass and the context of its recompute."""

_FUNCTION: Final = "_gradient_checkpointing_func"


def enable_checkpointing(model: PreTrainedModel, context_fn: ContextFn) -> None:
    """Recompute every decoder layer in the backward pass of a model in training mode.

    Set on the layers themselves: both ends of the supported transformers range read the same two
    attributes, while the method that sets them was renamed in between.
    Raises UserError when the model's layers do not support it.
    """
    for index, layer in enumerate(decoder_stack(model)):
        if not isinstance(layer, GradientCheckpointingLayer):
            raise UserError(
                "model-checkpointing",
                f"decoder layer {index} can't be recomputed",
                type(model).__name__,
                'set model.activation_checkpointing = "none"',
            )
        recompute = _uncompiled(partial(checkpoint, use_reentrant=False, context_fn=context_fn))
        object.__setattr__(layer, "_gradient_checkpointing_func", recompute)
        layer.gradient_checkpointing = True


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where a layer is compiled, its forward is, inside this call; contexts of one's own can't be traced."""
    outside: Callable[..., Any] = torch.compiler.disable(  # type: ignore[no-untyped-call]
        function, recursive=False
    )
    return outside


def disable_checkpointing(model: PreTrainedModel) -> None:
    """Keep all activations again."""
    for layer in decoder_stack(model):
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = False


@contextmanager
def checkpointing(model: PreTrainedModel, context_fn: ContextFn, *, enabled: bool) -> Iterator[None]:
    """Checkpointing switched for the body, for probes that compare both ways.

    Afterwards each layer is as before, its own contexts included.
    """
    layers = [layer for layer in decoder_stack(model) if isinstance(layer, GradientCheckpointingLayer)]
    before = [(layer.gradient_checkpointing, vars(layer).get(_FUNCTION)) for layer in layers]
    try:
        if enabled:
            enable_checkpointing(model, context_fn)
        else:
            disable_checkpointing(model)
        yield
    finally:
        for layer, (switched_on, function) in zip(layers, before, strict=True):
            layer.gradient_checkpointing = switched_on
            setattr(layer, _FUNCTION, function)
