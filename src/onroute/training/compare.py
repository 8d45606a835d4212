"""The same sampled tokens under the same weights, scored on the trainer's own routes and on the engine's.

What remains between engine and trainer under replay is arithmetic; what replay takes away is routing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onroute.algorithms.bootstrap import Interval, bootstrap_ratio
from onroute.algorithms.mismatch import MismatchSums, sequence_k3
from onroute.core.config.sections import RunConfig
from onroute.core.errors import UserError
from onroute.core.samples import Group, Sample
from onroute.core.seeds import seed_for
from onroute.data.batch import flatten, whole_batch
from onroute.data.plan import plan_batch
from onroute.models.world import World
from onroute.training.microbatch import Microbatch, assemble, split_by_sample
from onroute.training.scoring import score, under
from onroute.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Rollouts of one step and the Hugging Face folder of the weights that sampled them."""

    step: int
    groups: Sequence[Group]
    weights: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """native, replay: mismatch metrics against the engine, see `MismatchSums.metrics`.
    k3_factor, abs_factor: native / replay of k3 and of mean |Δ log-prob|, with a bootstrap interval
        over sequences.
    layers, agreement: per MoE layer, share of the engine's experts that the trainer's router would pick.
    engine_log_probs, native_log_probs, replay_log_probs: float64 [N], all sampled tokens.
    """

    steps: tuple[int, ...]
    num_sequences: int
    native: Mapping[str, float]
    replay: Mapping[str, float]
    k3_factor: Interval
    abs_factor: Interval
    layers: tuple[int, ...]
    agreement: tuple[float, ...]
    engine_log_probs: NDArray[np.float64]
    native_log_probs: NDArray[np.float64]
    replay_log_probs: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """Log-probs per sequence, each a list of [tokens], and the agreement of one recorded step."""

    engine: list[NDArray[np.float32]]
    native: list[NDArray[np.float32]]
    replay: list[NDArray[np.float32]]
    layers: tuple[int, ...]
    agreement: tuple[float, ...]


def compare(config: RunConfig, recorded: Sequence[Recorded], world: World) -> Comparison:
    """Score every recorded step twice with the weights that sampled it. Trains nothing.

    Raises UserError when a sample has no route or the model is dense.
    """
    scored = [_score_step(config, step, world) for step in recorded]
    joined = {
        side: [values for step in scored for values in getattr(step, side)]
        for side in ("engine", "native", "replay")
    }
    tokens = [sum(map(len, step.engine)) for step in scored]
    agreement = np.average([step.agreement for step in scored], axis=0, weights=tokens)
    seed = seed_for(config.run.seed, "compare")
    sums = {side: _per_sequence(joined[side], joined["engine"]) for side in ("native", "replay")}
    return Comparison(
        steps=tuple(step.step for step in recorded),
        num_sequences=len(joined["engine"]),
        native=_metrics(joined["native"], joined["engine"]),
        replay=_metrics(joined["replay"], joined["engine"]),
        k3_factor=bootstrap_ratio(sums["native"][0], sums["replay"][0], seed=seed),
        abs_factor=bootstrap_ratio(sums["native"][1], sums["replay"][1], seed=seed),
        layers=scored[0].layers,
        agreement=tuple(float(value) for value in agreement),
        engine_log_probs=np.concatenate(joined["engine"]).astype(np.float64),
        native_log_probs=np.concatenate(joined["native"]).astype(np.float64),
        replay_log_probs=np.concatenate(joined["replay"]).astype(np.float64),
    )


def _score_step(config: RunConfig, recorded: Recorded, world: World) -> _Scored:
    config = replace(
        config,
        model=replace(config.model, path=str(recorded.weights)),
        routing=replace(config.routing, replay="rollout"),
    )
    trainer = Trainer(config, world, total_steps=1)
    assert trainer.routes is not None
    samples, numbers = flatten(recorded.groups)
    routeless = next((sample.id for sample in samples if sample.routing is None), None)
    if routeless is not None:
        raise UserError(
            "compare-no-routes",
            "the rollouts were recorded without routes",
            f"step {recorded.step}, sample {routeless}",
            'compare a run with routing.replay = "rollout"',
        )
    plan = plan_batch(
        [sample.num_tokens for sample in samples], numbers, ranks=1, steps=1,
        layout=config.data.layout, microbatch_tokens=config.data.microbatch_tokens,
    )  # fmt: skip
    batch = whole_batch(samples, numbers, plan, rank=0)
    nothing = np.zeros(len(samples))
    microbatches = [
        assemble(
            batch,
            indices,
            layout=config.data.layout,
            device=world.device,
            advantages=nothing,
            weights=nothing,
        )
        for indices in plan.assignment[0][0]
    ]
    temperature, session = config.engine.temperature, trainer.routes.session
    native = score(trainer.model, microbatches, within=under(None), temperature=temperature)
    with trainer.routes.replaying(batch.samples):
        replayed = score(trainer.model, microbatches, within=under(session), temperature=temperature)
        routing = session.settle(recompute=False)

    def by_sequence(values: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        return _by_sequence(microbatches, batch.samples, values)

    return _Scored(
        engine=by_sequence([microbatch.engine_log_probs for microbatch in microbatches]),
        native=by_sequence(native),
        replay=by_sequence(replayed),
        layers=trainer.routes.map.layers,
        agreement=routing.agreement_by_layer,
    )


def _by_sequence(
    microbatches: Sequence[Microbatch], samples: Mapping[int, Sample], values: Sequence[Tensor]
) -> list[NDArray[np.float32]]:
    parts: dict[int, NDArray[np.float32]] = {}
    for microbatch, value in zip(microbatches, values, strict=True):
        parts |= split_by_sample(microbatch, samples, value)
    return [parts[index] for index in sorted(parts) if len(parts[index])]


def _per_sequence(
    trainer: Sequence[NDArray[np.float32]], engine: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of k3 and of |Δ| per sequence, what the bootstrap resamples."""
    pairs = list(zip(trainer, engine, strict=True))
    k3 = np.array([sequence_k3(t, e) for t, e in pairs])
    return k3, np.array([np.abs((t - e).astype(np.float64)).sum() for t, e in pairs])


def _metrics(
    trainer: Sequence[NDArray[np.float32]], engine: Sequence[NDArray[np.float32]]
) -> dict[str, float]:
    sums = MismatchSums("cpu")
    tokens = torch.from_numpy(np.concatenate(trainer))
    sums.add(tokens, torch.from_numpy(np.concatenate(engine)), torch.ones_like(tokens, dtype=torch.bool))
    return {name.removeprefix("mismatch/"): value for name, value in sums.metrics("mismatch").items()}
