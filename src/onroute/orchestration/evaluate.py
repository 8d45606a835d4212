"""Held-out evaluation: sampled accuracy on problems that are never trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onroute.core.config.sections import RunConfig
from onroute.core.environment import Environment
from onroute.core.sampling import SamplingParams
from onroute.core.seeds import seed_for
from onroute.observability.evaluation import evaluation_metrics
from onroute.orchestration.folder import RunFolder
from onroute.orchestration.handles import RolloutHandle

CORRECT_FROM = 1.0 - 1e-6
"""A sample counts as right when its reward reaches full marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """metrics: `eval/…`. accuracy: float64 [num_problems], share of right samples of each."""

    metrics: Mapping[str, float]
    accuracy: NDArray[np.float64]


def write_evaluations(folder: RunFolder, evaluations: Mapping[str, Evaluation]) -> None:
    """Keep the evaluations of a run by stage, so that a resumed one knows those of before."""
    content = {
        stage: {"metrics": dict(result.metrics), "accuracy": result.accuracy.tolist()}
        for stage, result in evaluations.items()
    }
    folder.write(folder.evaluations, json.dumps(content))


def read_evaluations(folder: RunFolder, stages: Sequence[str]) -> dict[str, Evaluation]:
    """The kept evaluations of `stages`; none when the file is missing or can't be read."""
    try:
        content = json.loads(folder.evaluations.read_text())
        return {
            stage: Evaluation(
                metrics={str(name): float(value) for name, value in content[stage]["metrics"].items()},
                accuracy=np.array(content[stage]["accuracy"], dtype=np.float64),
            )
            for stage in stages
            if stage in content
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


async def evaluate(
    config: RunConfig,
    environment: Environment,
    rollouts: RolloutHandle[object],
    *,
    sampling: SamplingParams,
) -> Evaluation:
    """Sample every held-out problem; the same seeds each time, so that two evaluations are paired."""
    prompts = [environment.prompt("held_out", index) for index in range(config.run.eval_prompts)]
    seeds = [seed_for(config.run.seed, "evaluation", prompt.id) for prompt in prompts]
    sampled = await rollouts.rollout(prompts, seeds, n=config.run.eval_samples, sampling=sampling)
    right = [[fact.reward >= CORRECT_FROM for fact in rollout.facts] for rollout in sampled]
    return Evaluation(metrics=evaluation_metrics(right), accuracy=np.array([np.mean(row) for row in right]))
