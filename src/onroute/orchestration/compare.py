"""Finds what a run recorded and compares native with replayed routing on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onroute.core.config.sections import RunConfig
from onroute.core.errors import UserError
from onroute.data.recorded import load_rollouts, recorded_steps, step_folder
from onroute.models.world import open_world
from onroute.observability.plot_compare import ComparedTokens, plot_compare
from onroute.orchestration.folder import SAMPLED_BY, RunFolder
from onroute.training.compare import Comparison, Recorded, compare


def compare_run(config: RunConfig, folder: RunFolder) -> tuple[Comparison, Path]:
    """Score all recorded steps of a run; the comparison and the picture drawn of it.

    config: the run's own resolved config. Raises UserError when nothing was recorded.
    """
    steps = recorded_steps(folder.rollouts)
    if not steps:
        raise UserError(
            "compare-no-rollouts",
            "the run recorded no rollouts",
            str(folder.rollouts),
            "run it with checkpoint.recorded_steps of 1 or more",
        )
    recorded = []
    for step in steps:
        place = step_folder(folder.rollouts, step)
        recorded.append(Recorded(step=step, groups=load_rollouts(place), weights=place / SAMPLED_BY))
    with open_world(timeout_s=config.parallel.timeout_s, threads=config.run.threads) as world:
        result = compare(config, recorded, world)
    folder.plots.mkdir(exist_ok=True)
    picture = plot_compare(
        ComparedTokens(
            layers=result.layers,
            agreement=np.array(result.agreement),
            engine=result.engine_log_probs,
            native=result.native_log_probs,
            replay=result.replay_log_probs,
        ),
        folder.plots,
    )
    return result, picture
