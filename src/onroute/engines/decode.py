"""The decoding loop: a batch of prompts of any lengths in, their continuations and routes out.

Prompts are padded on the left, so that the newest token of every row is in the same column. Where
padding lies is known from lengths, never from a token's value.

Legend: B rows, S columns, L MoE layers, K experts per token, M stop ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from onroute.core.samples import SampleRequest
from onroute.engines.capture import RouteCapture
from onroute.engines.forward import CachedForward
from onroute.engines.sampling import RowSettings, draw, uniforms_for
from onroute.engines.tape import Continuation, Tape

PREFILL_TOKENS = 65_536
"""Most tokens of one prefill pass, padding included; longer prompts are fed in pieces."""
_MIN_CHUNK = 16
_FLUSH_STEPS = 256


@dataclass(slots=True, kw_only=True)
class _Rows:
    """The rows still in the batch.

    index: [B] position of each row among the requests.
    lengths: int64 [B] prompt tokens. limits: int64 [B] most new tokens. stops: int64 [B, M], -1 unused.
    uniforms: float32 [B, most new tokens]. mask: int64 [B, S + most new tokens], or None when all
        prompts are equally long. done: bool [B].
    """

    index: NDArray[np.int64]
    settings: RowSettings
    lengths: Tensor
    limits: Tensor
    stops: Tensor
    uniforms: Tensor
    mask: Tensor | None
    done: Tensor

    def select(self, rows: Tensor) -> _Rows:
        return _Rows(
            index=self.index[rows.cpu().numpy()],
            settings=self.settings.select(rows),
            lengths=self.lengths[rows],
            limits=self.limits[rows],
            stops=self.stops[rows],
            uniforms=self.uniforms[rows],
            mask=None if self.mask is None else self.mask[rows],
            done=self.done[rows],
        )


def decode(
    model: PreTrainedModel,
    requests: Sequence[SampleRequest],
    *,
    capture: RouteCapture | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> list[Continuation]:
    """Continue every prompt until it stops or its limit is reached, in the order of `requests`.

    The sampled tokens of a row depend on its own seed and its own logits. In float32 the rest of
    the batch moves log-probs by rounding only, about 1e-6. In bfloat16 it moves them by about 1e-2:
    of 64 samples of 30 tokens from a random model, 15 took another token somewhere when they were
    decoded alone. The same batch always gives the same tokens.
    """
    with torch.inference_mode():
        return _decode(model, requests, capture, prefill_tokens)


def _decode(
    model: PreTrainedModel,
    requests: Sequence[SampleRequest],
    capture: RouteCapture | None,
    prefill_tokens: int,
) -> list[Continuation]:
    tape = Tape(requests)
    forward = CachedForward(model, capture)
    logits_BV, rows = _prefill(forward, requests, tape, model.device, prefill_tokens)
    columns = max(len(request.prompt_tokens) for request in requests)
    for step in range(int(rows.limits.max())):
        tokens_B, log_probs_B = draw(logits_BV, rows.settings, rows.uniforms[:, step])
        tape.add_tokens(tokens_B, log_probs_B)
        rows.done |= (tokens_B[:, None] == rows.stops).any(dim=-1) | (step + 1 >= rows.limits)
        num_live = int((~rows.done).sum())
        if num_live == 0:
            break
        if num_live <= len(rows.index) // 2:
            # Each time half of the rows are over, dropping them repays the copy of the cache.
            live = (~rows.done).nonzero()[:, 0]
            tape.flush(rows.index)
            rows, tokens_B = rows.select(live), tokens_B[live]
            forward.select(live)
        elif (step + 1) % _FLUSH_STEPS == 0:
            tape.flush(rows.index)
        mask = None if rows.mask is None else rows.mask[:, : columns + step + 1]
        logits_BV, routes = forward(tokens_B[:, None], rows.lengths[:, None] + step, mask)
        tape.add_routes(routes)
    tape.flush(rows.index)
    return tape.continuations()


def _prefill(
    forward: CachedForward,
    requests: Sequence[SampleRequest],
    tape: Tape,
    device: torch.device,
    prefill_tokens: int,
) -> tuple[Tensor, _Rows]:
    """Feed the prompts -> logits [B, V] of their last tokens, and the rows."""
    lengths = np.array([len(request.prompt_tokens) for request in requests], dtype=np.int64)
    limits = np.array([request.sampling.max_new_tokens for request in requests], dtype=np.int64)
    columns = int(lengths.max())
    real_BS = np.arange(columns) >= columns - lengths[:, None]
    ids_BS = np.zeros((len(requests), columns), dtype=np.int64)
    ids_BS[real_BS] = np.concatenate([request.prompt_tokens for request in requests])
    ids = torch.from_numpy(ids_BS).to(device)
    position_ids = torch.from_numpy((real_BS.cumsum(axis=1) - 1).clip(min=0)).to(device)
    full_mask = None
    if lengths.min() < columns:
        new_columns = ((0, 0), (0, int(limits.max())))
        full_mask = torch.from_numpy(np.pad(real_BS, new_columns, constant_values=True)).to(device).long()

    # A piece of one column must hold no padding: models with recurrent layers take it for decoding.
    # It can only be the last column, which is real in every row.
    width = max(_MIN_CHUNK, prefill_tokens // len(requests))
    for start in range(0, columns, width):
        piece = slice(start, start + width)
        seen = None if full_mask is None else full_mask[:, : min(columns, start + width)]
        logits_BV, routes = forward(ids[:, piece], position_ids[:, piece], seen)
        tape.add_prompt_routes(routes)
    rows = _Rows(
        index=np.arange(len(requests)),
        settings=RowSettings.of(requests, logits_BV.shape[-1], device),
        lengths=torch.from_numpy(lengths).to(device),
        limits=torch.from_numpy(limits).to(device),
        stops=_stop_table(requests).to(device),
        uniforms=torch.from_numpy(_uniform_table(requests)).to(device),
        mask=full_mask,
        done=torch.zeros(len(requests), dtype=torch.bool, device=device),
    )
    return logits_BV, rows


def _stop_table(requests: Sequence[SampleRequest]) -> Tensor:
    width = max(len(request.sampling.stop_token_ids) for request in requests)
    table = torch.full((len(requests), width), -1, dtype=torch.int64)
    for row, request in enumerate(requests):
        ids = request.sampling.stop_token_ids
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return table


def _uniform_table(requests: Sequence[SampleRequest]) -> NDArray[np.float32]:
    limits = [request.sampling.max_new_tokens for request in requests]
    table = np.zeros((len(requests), max(limits)), dtype=np.float32)
    for row, request in enumerate(requests):
        table[row, : limits[row]] = uniforms_for(request.seed, limits[row])
    return table
