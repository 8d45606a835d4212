"""Drawing tokens from logits: pure tensor functions, one row a sample.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onroute.core.samples import SampleRequest


def uniforms_for(seed: int, count: int) -> NDArray[np.float32]:
    """[count] numbers in [0, 1), a function of `seed` alone; a longer draw begins with a shorter one."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    return generator.random(count, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """`SamplingParams` of B rows as tensors.

    temperature, top_p: float32 [B]. top_k: int64 [B], the vocabulary size where nothing is cut.
    greedy, cuts: whether any row is greedy, or cut by top_p or top_k; known on the host, so that
        the common case costs no synchronisation.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    greedy: bool
    cuts: bool

    @classmethod
    def of(cls, requests: Sequence[SampleRequest], vocab_size: int, device: torch.device) -> RowSettings:
        params = [request.sampling for request in requests]
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
        top_k = torch.tensor([p.top_k or vocab_size for p in params], dtype=torch.int64, device=device)
        return cls(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            greedy=any(p.temperature == 0 for p in params),
            cuts=any(p.top_p < 1 or (p.top_k or vocab_size) < vocab_size for p in params),
        )

    def select(self, rows: Tensor) -> RowSettings:
        """The settings of the rows at int64 indices `rows`."""
        return RowSettings(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            greedy=self.greedy,
            cuts=self.cuts,
        )


def draw(logits_BV: Tensor, settings: RowSettings, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row -> (tokens int64 [B], log-probs float32 [B]).

    The log-prob is that of softmax(logits / temperature), before top_k and top_p cut it. The token
    is where the cumulated probability of what is left, renormalised, in the order of the
    vocabulary, first exceeds the row's uniform number. A row of temperature 0 takes the likeliest
    token, with its log-prob at temperature 1.
    """
    is_greedy_B = settings.temperature == 0
    scale_B = torch.where(is_greedy_B, 1.0, settings.temperature)
    log_probs_BV = torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    probs_BV = log_probs_BV.exp()
    if settings.cuts:
        probs_BV = cut(probs_BV, settings.top_p, settings.top_k)
    tokens_B = _inverse_cdf(probs_BV, uniforms_B)
    if settings.greedy:
        tokens_B = torch.where(is_greedy_B, logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B, log_probs_BV.gather(-1, tokens_B[:, None])[:, 0]


def cut(probs_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Zero what top_k, then top_p leave out; not renormalised.

    top_p keeps the fewest likeliest tokens whose share of what top_k left reaches it, at least one.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_BV.shape[-1], device=probs_BV.device)
    sorted_BV = torch.where(rank_V < top_k_B[:, None], sorted_BV, 0.0)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    # A top_p of 1 must not lose tail tokens to the rounding of the sum.
    uncut_B1 = top_p_B[:, None] >= 1
    within_BV = before_BV < top_p_B[:, None] * sorted_BV.sum(dim=-1, keepdim=True)
    kept_BV = torch.where(uncut_B1 | within_BV | (rank_V == 0), sorted_BV, 0.0)
    return torch.zeros_like(probs_BV).scatter(-1, order_BV, kept_BV)


def _inverse_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first token whose cumulated weight exceeds uniform x total -> int64 [B]."""
    cdf_BV = weights_BV.cumsum(dim=-1)
    # A float32 below 1 times total is below total in float32 too, so some token always exceeds it;
    # the clamp is for NaN, which comes out as the log-prob.
    target_B1 = uniforms_B[:, None] * cdf_BV[:, -1:]
    tokens_B = torch.searchsorted(cdf_BV, target_B1, right=True)[:, 0].clamp(max=weights_BV.shape[-1] - 1)
    # A parallel cumulative sum may rise, by rounding, at a token of no weight; that one is never drawn.
    drawn_B = weights_BV.gather(-1, tokens_B[:, None])[:, 0]
    return torch.where(drawn_B > 0, tokens_B, weights_BV.argmax(dim=-1))
