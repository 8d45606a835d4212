"""One cached forward pass of a stock causal model, with the routes it took.

Legend: B rows, S columns of this pass, L MoE layers, K experts per token, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from onroute.engines.capture import RouteCapture


class ForwardOutput(NamedTuple):
    """logits: [B, V] of the last column. routes: [B, S, L, K] small integers, or None."""

    logits: Tensor
    routes: Tensor | None


class CachedForward:
    """Feeds a model column by column and keeps its cache.

    The model makes the cache itself, so that hybrid models get the kind their layers need.
    """

    def __init__(self, model: PreTrainedModel, capture: RouteCapture | None) -> None:
        self._model = model
        self._capture = capture
        self._cache: Any = None
        # transformers renames the argument; the old name warns in newer releases.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def __call__(self, ids_BS: Tensor, positions_BS: Tensor, attention_mask: Tensor | None) -> ForwardOutput:
        """`attention_mask` is [B, columns so far and of this pass], or None when nothing is padding."""
        if self._capture is None:
            return ForwardOutput(self._run(ids_BS, positions_BS, attention_mask), None)
        with self._capture.recorder.recording() as record:
            logits_BV = self._run(ids_BS, positions_BS, attention_mask)
        num_layers, _, top_k = record.ids.shape
        routes_LBSK = record.ids.to(self._capture.storage_dtype).view(num_layers, *ids_BS.shape, top_k)
        return ForwardOutput(logits_BV, routes_LBSK.permute(1, 2, 0, 3))

    def _run(self, ids_BS: Tensor, positions_BS: Tensor, attention_mask: Tensor | None) -> Tensor:
        output = self._model(
            input_ids=ids_BS,
            position_ids=positions_BS,
            attention_mask=attention_mask,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self._cache},
        )
        self._cache = output[self._cache_name]
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    def select(self, rows: Tensor) -> None:
        """Keep only the rows at int64 indices `rows`."""
        self._cache.reorder_cache(rows)
