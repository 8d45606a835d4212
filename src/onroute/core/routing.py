"""The route that the tokens of one sample took through the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

ExpertIds: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]


def expert_dtype(num_experts: int) -> type[np.uint8] | type[np.uint16]:
    """The smallest integer type that holds every expert id."""
    return np.uint8 if num_experts <= 256 else np.uint16


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """Which experts the router chose, token by token.

    experts: [num_tokens, num_moe_layers, top_k]. Row t is the choice for the token at position t
        when it was an input of the model.
    layers: the global decoder layer index of each column, ascending; dense layers are absent, and a layer
        with two routers stands twice.
    num_experts: experts per layer; ids are 0 … num_experts-1.
    valid: [num_tokens] bool. A row that is not valid is served by the live router. The last
        sampled token was never an input, so its row is invalid.

    A model with 4 layers, the first of them dense, and 5 tokens of which the last was sampled:
    experts [5, 3, top_k], layers (1, 2, 3), valid [1, 1, 1, 1, 0].
    """

    experts: ExpertIds
    layers: tuple[int, ...]
    num_experts: int
    valid: NDArray[np.bool_]

    @property
    def num_tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def num_bytes(self) -> int:
        """Bytes that the choices take, the validity mask not counted."""
        return int(self.experts.nbytes)
