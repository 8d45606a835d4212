"""Routes of an engine's forward passes, as the wire type."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from onroute.core.routing import RoutingTrace, expert_dtype
from onroute.routing.capture import RouteRecorder
from onroute.routing.discovery import discover
from onroute.routing.interception import RouterHooks


class RouteCapture:
    """Hooks on every router of a model, recording while a forward pass runs.

    Raises UserError when the model has no routers, or some that cannot be found.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        probe = torch.tensor([[1, 0, 1, 0]], device=model.device)
        self.map = discover(model, lambda: model(input_ids=probe, use_cache=False))
        self.hooks = RouterHooks(model, self.map)
        self.recorder = RouteRecorder(self.hooks)
        # torch cannot index uint16; ids beyond a byte wait as int16 until they are on the host.
        fits_a_byte = expert_dtype(self.map.num_experts) is np.uint8
        self.storage_dtype = torch.uint8 if fits_a_byte else torch.int16

    def trace(self, routes: NDArray[Any], num_tokens: int) -> RoutingTrace:
        """The trace of a sample of `num_tokens`, of which the first len(routes) were inputs."""
        experts = np.zeros((num_tokens, *routes.shape[1:]), dtype=expert_dtype(self.map.num_experts))
        experts[: len(routes)] = routes
        return RoutingTrace(
            experts=experts,
            layers=self.map.layers,
            num_experts=self.map.num_experts,
            valid=np.arange(num_tokens) < len(routes),
        )

    def remove(self) -> None:
        """Give the model its stock routers back."""
        self.hooks.remove()
