"""Samples into the tensors of one microbatch.

Legend: B rows, S columns, T tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from onroute.core.batches import Layout, PackedBatch, TokenSpan
from onroute.core.samples import Sample
from onroute.data.plan import round_up

PAD_ID = 0
"""Any id of the vocabulary would do: what is padding is told by lengths, never by an id."""


def lay_out(
    samples: Sequence[tuple[int, Sample]],
    layout: Layout,
    device: torch.device | str,
    *,
    row_multiple: int = 1,
) -> PackedBatch:
    """One microbatch of (global index, sample) pairs. No samples give a filler: one dummy token.

    rows: [num_samples, longest], right-padded. Padding goes on counting positions, as Hugging Face
    does when it is given none, so nothing in a row looks like the start of a second document.
    packed: [1, Σ T], positions restart at each sample, no attention mask.
    Rows are padded to a multiple of `row_multiple`; in a packed row that padding is one more
    document with its own rising positions, since zeros would be a document per token.

    Samples of 3 and 2 tokens, packed to a multiple of 4: positions [0 1 2 0 1 0 1 2], spans at 0 and 3.
    """
    arrays = [sample.tokens for _, sample in samples] or [np.full(1, PAD_ID, dtype=np.int32)]
    multiple = row_multiple if samples else 1
    if layout == "rows":
        ids, positions, mask, starts = _rows(arrays, multiple)
    else:
        ids, positions, starts = _packed(arrays, multiple)
        mask = None
    spans = tuple(
        TokenSpan(sample=index, offset=start, length=sample.num_tokens)
        for (index, sample), start in zip(samples, starts, strict=False)
    )
    return PackedBatch(
        layout=layout,
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        attention_mask=None if mask is None else torch.from_numpy(mask).to(device),
        spans=spans,
    )


def _rows(
    arrays: Sequence[NDArray[np.int32]], multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], list[int]]:
    columns = round_up(max(len(tokens) for tokens in arrays), multiple)
    ids = np.full((len(arrays), columns), PAD_ID, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(arrays):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    positions = np.tile(np.arange(columns, dtype=np.int64), (len(arrays), 1))
    return ids, positions, mask, [row * columns for row in range(len(arrays))]


def _packed(
    arrays: Sequence[NDArray[np.int32]], multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
    lengths = [len(tokens) for tokens in arrays]
    tail = round_up(sum(lengths), multiple) - sum(lengths)
    documents = [*arrays, np.full(tail, PAD_ID, dtype=np.int32)]
    ids = np.concatenate(documents).astype(np.int64)[None]
    positions = np.concatenate([np.arange(len(d), dtype=np.int64) for d in documents])[None]
    return ids, positions, [sum(lengths[:i]) for i in range(len(lengths))]
