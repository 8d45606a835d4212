"""One optimizer step: forward, backward and recompute of every microbatch, the proof, the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onroute.algorithms.losses.base import LossInputs, LossTerms
from onroute.algorithms.mismatch import MismatchSums
from onroute.core.batches import StepReport
from onroute.core.errors import CheckError
from onroute.models.world import World
from onroute.routing.session import ReplaySession
from onroute.training.microbatch import Microbatch
from onroute.training.optimizer import clip_gradients
from onroute.training.scoring import bound, loss_token_log_probs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """microbatches: this rank's, as many as on every other rank; their weights hold the one global
        denominator of the step.
    old_log_probs: [n] per microbatch, None where the training pass itself gives them.
    max_log_prob_gap: largest mean |trainer - engine| in nats per token; None checks nothing.
    prefix: of the metrics.
    """

    microbatches: Sequence[Microbatch]
    old_log_probs: Sequence[Tensor | None]
    temperature: float
    clip_norm: float
    max_log_prob_gap: float | None
    prefix: str


def optimizer_step(
    inputs: StepInputs,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    loss: Callable[[LossInputs], LossTerms],
    session: ReplaySession | None,
    settle: Callable[[], Mapping[str, float]] | None,
) -> StepReport:
    """Learn from one step's microbatches. `settle` proves the replay before the optimizer moves.

    A loss or gradient norm that is not finite on any rank skips the update on all.
    Raises CheckError on every rank when the proof fails or the engine is too far off.
    """
    optimizer.zero_grad(set_to_none=True)
    sums = _StepSums(world)
    for number, (microbatch, old) in enumerate(zip(inputs.microbatches, inputs.old_log_probs, strict=True)):
        with bound(session, ("train", number), microbatch):
            log_probs = loss_token_log_probs(model, microbatch, inputs.temperature)
        reference = log_probs.detach() if old is None else old
        terms = loss(
            LossInputs(
                log_probs=log_probs,
                old_log_probs=reference,
                advantages=microbatch.advantages,
                mask=torch.ones_like(microbatch.positions, dtype=torch.bool),
            )
        )
        weighted = (terms.per_token * microbatch.weights).sum()
        # The sharded model averages gradients over ranks; the weights already count tokens of all ranks.
        (weighted * world.size).backward()  # type: ignore[no-untyped-call]
        sums.add(microbatch, weighted.detach(), terms, reference)
    routing = settle() if settle is not None else {}
    metrics = sums.metrics(inputs.prefix, with_engine=inputs.max_log_prob_gap is not None)
    if inputs.max_log_prob_gap is not None:
        _require_close(metrics, inputs.max_log_prob_gap)
    norm = clip_gradients(model.parameters(), inputs.clip_norm)
    stepped = math.isfinite(norm) and math.isfinite(metrics[f"{inputs.prefix}/loss"])
    if stepped:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    metrics |= {f"{inputs.prefix}/grad_norm": norm, f"{inputs.prefix}/skipped": float(not stepped), **routing}
    return StepReport(stepped=stepped, metrics=metrics)


class _StepSums:
    """Adds up on the device what a step reports; one reduction and one transfer at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[str, Tensor] = {}
        self._mismatch = MismatchSums(world.device, rank=world.rank, num_ranks=world.size)

    def add(self, microbatch: Microbatch, loss: Tensor, terms: LossTerms, log_probs: Tensor) -> None:
        mask = torch.ones_like(microbatch.positions, dtype=torch.bool)
        self._mismatch.add(log_probs, microbatch.engine_log_probs, mask)
        counts = {
            "loss": loss.double(),
            "tokens": loss.new_tensor(microbatch.positions.numel(), dtype=torch.float64),
            "input_tokens": loss.new_tensor(microbatch.real_tokens, dtype=torch.float64),
            "padded_tokens": loss.new_tensor(microbatch.batch.input_ids.numel(), dtype=torch.float64),
        }
        for name, value in {**counts, **terms.sums}.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value

    def metrics(self, prefix: str, *, with_engine: bool) -> dict[str, float]:
        """Plain numbers of the whole step: sums over ranks, means over loss tokens."""
        names = tuple(self._sums)
        total = dict(
            zip(names, self._world.sum(torch.stack(list(self._sums.values()))).tolist(), strict=True)
        )
        tokens = total.pop("tokens")
        padded, real = total.pop("padded_tokens"), total.pop("input_tokens")
        metrics = {
            f"{prefix}/loss": total.pop("loss"),
            f"{prefix}/loss_tokens": tokens,
            f"{prefix}/input_tokens": real,
            f"{prefix}/padding_share": 1.0 - real / padded,
            **{f"{prefix}/{name}": value / max(1.0, tokens) for name, value in total.items()},
        }
        if with_engine:
            self._mismatch.reduce(self._world.sum)
            metrics |= self._mismatch.metrics("mismatch")
        return metrics


def _require_close(metrics: Mapping[str, float], limit: float) -> None:
    gap = metrics.get("mismatch/log_prob_abs_diff", 0.0)
    if gap > limit:
        raise CheckError(
            "training-engine-gap",
            f"log-probs of trainer and engine differ by {gap:.3g} nats per token, allowed are {limit:g}",
            "before the optimizer step",
            "see that the engine took the last weights and uses engine.temperature; recorded rollouts want "
            "the weights that sampled them (in their step's folder) as model.path; "
            "or raise algorithm.max_log_prob_gap",
        )
