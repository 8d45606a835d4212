"""What the decoding loop gave, step by step on the device, put together row by row on the host.

Legend: B rows, S columns, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onroute.core.samples import SampleRequest, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What was sampled after one prompt of P tokens.

    tokens: int32 [num_new], a stop token included. log_probs: float32 [num_new].
    routes: [P + num_new - 1, L, K], the experts of every token that was an input; None without capture.
    """

    tokens: Tokens
    log_probs: NDArray[np.float32]
    routes: NDArray[Any] | None
    stop_reason: Literal["stop", "length"]


class Tape:
    """Keeps steps on the device until `flush`, which costs one transfer for all of them."""

    def __init__(self, requests: Sequence[SampleRequest]) -> None:
        self._requests = requests
        self._prompt_steps: list[Tensor] = []
        self._token_steps: list[Tensor] = []
        self._log_prob_steps: list[Tensor] = []
        self._route_steps: list[Tensor] = []
        self._tokens: list[list[NDArray[np.int64]]] = [[] for _ in requests]
        self._log_probs: list[list[NDArray[np.float32]]] = [[] for _ in requests]
        self._routes: list[list[NDArray[Any]]] = [[] for _ in requests]

    def add_prompt_routes(self, routes_BSLK: Tensor | None) -> None:
        """Routes of the next columns of the left-padded prompts, all rows."""
        if routes_BSLK is not None:
            self._prompt_steps.append(routes_BSLK)

    def add_tokens(self, tokens_B: Tensor, log_probs_B: Tensor) -> None:
        """What every row in the batch drew in this step."""
        self._token_steps.append(tokens_B)
        self._log_prob_steps.append(log_probs_B)

    def add_routes(self, routes_B1LK: Tensor | None) -> None:
        """Routes of the token that every row drew in the step before."""
        if routes_B1LK is not None:
            self._route_steps.append(routes_B1LK)

    def flush(self, index: NDArray[np.int64]) -> None:
        """Move the steps to the host; their rows belong to the requests at `index`."""
        if self._prompt_steps:
            self._flush_prompts()
        if self._token_steps:
            tokens_BS = torch.stack(self._token_steps, dim=1).cpu().numpy()
            log_probs_BS = torch.stack(self._log_prob_steps, dim=1).cpu().numpy()
            for row, request in enumerate(index):
                self._tokens[request].append(tokens_BS[row])
                self._log_probs[request].append(log_probs_BS[row])
        if self._route_steps:
            routes_BSLK = torch.cat(self._route_steps, dim=1).cpu().numpy()
            for row, request in enumerate(index):
                self._routes[request].append(routes_BSLK[row])
        self._token_steps, self._log_prob_steps, self._route_steps = [], [], []

    def _flush_prompts(self) -> None:
        routes_BSLK = torch.cat(self._prompt_steps, dim=1).cpu().numpy()
        for row, request in enumerate(self._requests):
            padding = routes_BSLK.shape[1] - len(request.prompt_tokens)
            self._routes[row].append(routes_BSLK[row, padding:])
        self._prompt_steps = []

    def continuations(self) -> list[Continuation]:
        """All rows, cut where each of them stopped."""
        return [self._continuation(row) for row in range(len(self._requests))]

    def _continuation(self, row: int) -> Continuation:
        request = self._requests[row]
        tokens = np.concatenate(self._tokens[row])[: request.sampling.max_new_tokens]
        stops = np.flatnonzero(np.isin(tokens, request.sampling.stop_token_ids))
        count = int(stops[0]) + 1 if stops.size else len(tokens)
        routes = None
        if self._routes[row]:
            routes = np.concatenate(self._routes[row])[: len(request.prompt_tokens) + count - 1]
        return Continuation(
            tokens=tokens[:count].astype(np.int32),
            log_probs=np.concatenate(self._log_probs[row])[:count],
            routes=routes,
            stop_reason="stop" if stops.size else "length",
        )
