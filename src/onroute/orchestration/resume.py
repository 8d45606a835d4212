"""Which checkpoint a run goes on from, and what may have changed in its run file since.

Only markers are read here, so that a mistake is told before a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from onroute.core.config.sections import RunConfig
from onroute.core.errors import UserError
from onroute.core.samples import Json
from onroute.observability.trackers.jsonl import read_metrics
from onroute.orchestration.checkpoints import saved_steps
from onroute.orchestration.folder import RunFolder
from onroute.training.marker import damaged, read_marker

_SAME_RUN = ("run.seed", "environment.name", "environment.options")
"""What the prompt cursor counts in; with another value it would point at other prompts."""
_FREE = frozenset(
    {
        "run.folder", "run.ray_address", "run.restarts", "run.resume", "run.steps", "run.eval_every",
        "run.eval_samples", "environment.workers", "environment.timeout_s", "parallel.placement_timeout_s",
        "run.supervised_steps", "run.supervised_samples", "run.supervised_lr",
        "routing.start_check", "engine.push_bucket_mib", "parallel.timeout_s",
        "algorithm.max_log_prob_gap", "optimizer.max_nonfinite_steps",
    }
)  # fmt: skip
"""Change nothing in the steps that follow; nor do the keys of the sections below."""
_FREE_SECTIONS = ("checkpoint", "tracking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a run goes on. `later`: steps of checkpoints that the next save will remove; `changed`: keys
    with another value than before, told to the user."""

    step: int
    path: Path
    later: tuple[int, ...]
    changed: tuple[str, ...]

    def notes(self) -> list[str]:
        """What the user should know, a line each."""
        lines = [f"resumed after step {self.step} from {self.path}"]
        if self.changed:
            lines.append(f"not the same run from here on: {', '.join(self.changed)}")
        if self.later:
            steps = ", ".join(map(str, self.later))
            lines.append(f"the checkpoints of step {steps} are done anew; the next save removes them")
        return lines


def find_resumption(folder: RunFolder, config: RunConfig) -> Resumption | None:
    """The checkpoint that `run.resume` asks for; None when the run begins at its beginning.

    Raises UserError when the step asked for is not there, the checkpoint's marker or a file's size says
    that it is damaged, it is of another seed or environment, it lies beyond the last step of the run, or
    the metrics to go on with have a broken line.
    """
    saved = saved_steps(folder.checkpoints)
    wanted = config.run.resume
    if wanted == "never" or (wanted == "auto" and not saved):
        return None
    step = max(saved) if wanted == "auto" else int(wanted)
    if step not in saved:
        raise UserError(
            "resume-step",
            f"there is no checkpoint of step {step}; there are: {', '.join(map(str, saved)) or 'none'}",
            str(folder.checkpoints),
            "set run.resume to one of them, or to auto",
        )
    try:
        facts = read_marker(saved[step]).facts
    except UserError as error:
        raise naming_the_others(error, folder, step) from error
    if step > config.run.steps:
        raise UserError(
            "resume-steps",
            f"the checkpoint is of step {step}, the run ends with step {config.run.steps}",
            str(saved[step]),
            "raise run.steps or resume from an earlier step",
        )
    before = facts.get("config")
    if not isinstance(before, dict):
        raise damaged(saved[step], "it is no checkpoint of a driven run: the config is not among its facts")
    if folder.metrics.exists():
        read_metrics(folder.metrics)
    later = tuple(other for other in saved if other > step)
    return Resumption(step=step, path=saved[step], later=later, changed=_changes(before, config, saved[step]))


def naming_the_others(error: UserError, folder: RunFolder, step: int) -> UserError:
    """The error of a damaged checkpoint, saying which others may be asked for."""
    others = [other for other in saved_steps(folder.checkpoints) if other != step]
    if error.code != "checkpoint-damaged" or not others:
        return error
    best = max((other for other in others if other < step), default=others[-1])
    also = f" (there are: {', '.join(map(str, others))})" if len(others) > 1 else ""
    fix = f"--run.resume={best} goes on from the checkpoint of step {best}{also}"
    return UserError(error.code, error.what, error.where, fix)


def config_facts(config: RunConfig) -> dict[str, Json]:
    """Every key with its value, as a checkpoint keeps them."""
    facts: dict[str, Json] = {}
    for section in fields(config):
        for name, value in asdict(getattr(config, section.name)).items():
            facts[f"{section.name}.{name}"] = list(value) if isinstance(value, tuple) else value
    return facts


def _changes(before: Mapping[str, Json], config: RunConfig, path: Path) -> tuple[str, ...]:
    """`key: old -> new` of what differs and matters. A key that only one of the two knows is left out.

    Raises UserError when it makes the checkpoint one of another run.
    """
    now = config_facts(config)
    differing = [key for key in now if key in before and before[key] != now[key] and _matters(key, config)]
    told = {key: f"{key} {before[key]!r} -> {now[key]!r}" for key in differing}
    refused = [told[key] for key in _SAME_RUN if key in told]
    if refused:
        raise UserError(
            "resume-config",
            f"the checkpoint is of another run: {', '.join(refused)}",
            str(path),
            "set the old values, or start a new run in another run.folder",
        )
    return tuple(told.values())


def _matters(key: str, config: RunConfig) -> bool:
    if key == "run.steps":
        return config.optimizer.schedule != "constant"  # the schedule ends with the last step
    return key not in _FREE and key.partition(".")[0] not in _FREE_SECTIONS
