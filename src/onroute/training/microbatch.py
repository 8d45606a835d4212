"""One microbatch with what the loss needs of it.

Legend: B rows, S columns, n loss tokens. Losses see loss tokens only, as vectors [n], so nothing that
stands on a prompt or on padding can reach them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onroute.core.batches import Layout, PackedBatch, TrainBatch
from onroute.core.samples import Sample
from onroute.data.layout import lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """batch: the model's input.
    positions: int64 [n], flat positions of the loss tokens in the batch's [B, S]; the logits that
        predict the token at p are those at p - 1.
    targets: int64 [n], the loss tokens.
    engine_log_probs, advantages, weights: float32 [n] of those tokens; the weights are those of the
        whole optimizer step, see `onroute.algorithms.aggregation`.
    real_tokens: tokens of samples, padding and filler not counted.
    """

    batch: PackedBatch
    positions: Tensor
    targets: Tensor
    engine_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    real_tokens: int


def assemble(
    train_batch: TrainBatch,
    indices: Sequence[int],
    *,
    layout: Layout,
    device: torch.device,
    advantages: NDArray[np.float64],
    weights: NDArray[np.float64],
) -> Microbatch:
    """The samples `indices` of a batch as one microbatch; none of them gives a filler.

    advantages, weights: [num_samples] by global index; every loss token of a sample gets its value.
    """
    samples = [(index, train_batch.samples[index]) for index in indices]
    batch = lay_out(samples, layout, device)
    picks = [_loss_positions(sample) for _, sample in samples]
    counts = np.array([len(pick) for pick in picks], dtype=np.int64)
    chosen = list(indices)
    positions = _joined([span.offset + pick for span, pick in zip(batch.spans, picks, strict=True)], np.int64)
    log_probs = _joined([s.log_probs[pick] for (_, s), pick in zip(samples, picks, strict=True)], np.float32)
    flat = torch.from_numpy(positions).to(device)
    return Microbatch(
        batch=batch,
        positions=flat,
        targets=batch.input_ids.flatten()[flat],
        engine_log_probs=torch.from_numpy(log_probs).to(device),
        advantages=_spread(advantages[chosen], counts, device),
        weights=_spread(weights[chosen], counts, device),
        real_tokens=sum(sample.num_tokens for _, sample in samples),
    )


def split_by_sample(
    microbatch: Microbatch, samples: Mapping[int, Sample], values: Tensor
) -> dict[int, NDArray[np.float32]]:
    """Values [n] of loss tokens back to the samples they belong to, by global index."""
    host = values.detach().float().cpu().numpy()
    counts = [len(_loss_positions(samples[span.sample])) for span in microbatch.batch.spans]
    parts = np.split(host, np.cumsum(counts)[:-1]) if counts else []
    return {span.sample: part for span, part in zip(microbatch.batch.spans, parts, strict=True)}


def _loss_positions(sample: Sample) -> NDArray[np.int64]:
    return np.flatnonzero(sample.loss_mask).astype(np.int64)


def _joined(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def _spread(per_sample: NDArray[np.float64], counts: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.repeat(per_sample, counts).astype(np.float32)).to(device)
