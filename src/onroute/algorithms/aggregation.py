"""How much each token counts in the loss of an optimizer step.

The loss of a step is the sum, over all ranks and microbatches, of weight times loss of each token.
The weights come from counts over the whole step, known before its first forward pass, so the result
does not depend on how samples were laid out or spread. Where a wrapper averages gradients over R
ranks, the caller multiplies the loss by R.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Aggregation: TypeAlias = Literal["token_mean", "sample_mean"]


def sample_weights(loss_tokens: NDArray[np.int64], aggregation: Aggregation) -> NDArray[np.float64]:
    """Weight of every loss token of each sample of one optimizer step.

    loss_tokens: [n], of all samples of the step on all ranks, fillers not among them.
    token_mean: 1 / total tokens. sample_mean: 1 / (samples that have tokens * tokens of the sample).
    A sample without loss tokens gets 0; all zeros mean that the step has nothing to learn from.

    Samples of 4 and 1 tokens: token_mean [1/5, 1/5], sample_mean [1/8, 1/2].
    """
    counts = np.asarray(loss_tokens, dtype=np.float64)
    trained = counts > 0
    if aggregation == "token_mean":
        per_token = np.broadcast_to(counts.sum(), counts.shape)
    else:
        per_token = trained.sum() * counts
    weights = np.zeros_like(counts)
    weights[trained] = 1.0 / per_token[trained]
    return weights
