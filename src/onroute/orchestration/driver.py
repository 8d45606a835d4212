"""The synchronous driver: sample, train, push, and again. Written against handles; it does not know
whether trainer and engine live in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic

import numpy as np

from onroute.core.config.sections import RunConfig
from onroute.core.engine import Engine
from onroute.core.environment import Demonstrator, Environment
from onroute.core.errors import MachineError, UserError
from onroute.core.samples import Json, Prompt, Sample
from onroute.core.sampling import SamplingParams
from onroute.core.seeds import seed_for
from onroute.data.recorded import prune
from onroute.data.stream import PromptStream, StreamState
from onroute.observability.metrics import Metrics
from onroute.observability.progress import Phase, Progress
from onroute.observability.spans import Spans
from onroute.observability.trackers.jsonl import read_metrics
from onroute.orchestration.checkpoints import BestStep, rotate
from onroute.orchestration.evaluate import Evaluation, evaluate, read_evaluations, write_evaluations
from onroute.orchestration.folder import RunFolder, step_path
from onroute.orchestration.handles import Held, Rollout, RolloutHandle, TrainerHandle
from onroute.orchestration.intake import rollout_metrics
from onroute.orchestration.resume import config_facts, find_resumption, naming_the_others
from onroute.orchestration.schedule import Schedule
from onroute.orchestration.together import finished
from onroute.training.marker import damaged

IDLE_STEPS = 3
"""Steps in a row without a spread of rewards before the user is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Generic[Held]):
    """Everything a driver drives. Who built them decides where they live; `environment` only gives it
    prompts and right answers."""

    trainer: TrainerHandle[Held]
    rollouts: RolloutHandle[Held]
    engine: Engine
    environment: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Evaluations by stage (`before`, `after_supervised`, `after`, and those between), seconds by phase
    of this session, and the metrics of its last step."""

    evaluations: Mapping[str, Evaluation]
    seconds: Mapping[str, float]
    last_metrics: Mapping[str, float]


class SynchronousDriver(Generic[Held]):
    """Drives one run from its first to its last step, or from the checkpoint that `run.resume` asks for."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts[Held],
        folder: RunFolder,
        *,
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        self._config, self._parts, self._folder = config, parts, folder
        self._metrics, self._progress = metrics, progress
        self._schedule = Schedule(config, folder)
        self._spans = Spans()
        self._sampling = SamplingParams(
            max_new_tokens=config.engine.max_new_tokens,
            temperature=config.engine.temperature,
            top_p=config.engine.top_p,
            top_k=config.engine.top_k,
        )
        self._stream = PromptStream(parts.environment, seed=config.run.seed)
        self._cursor = self._stream.state()
        """The prompts of finished steps; those of a step that an interrupt cut short are taken again."""
        self._version = 0
        self._step = 0
        self._first_step = 0
        self._idle_steps = 0
        self._saved_step: int | None = None
        self._best = BestStep(config.checkpoint.best)
        self._evaluations: dict[str, Evaluation] = {}
        self._seconds: dict[str, float] = {}
        self._last_metrics: dict[str, float] = {}

    async def run(self) -> Outcome:
        """The whole run. An interrupt saves a checkpoint of the steps that are done, then goes on up."""
        begun = time.monotonic()
        engine = self._parts.engine
        try:
            with self._traced():
                await self._drive()
        finally:
            await engine.close()
        self._seconds["total"] = time.monotonic() - begun
        return Outcome(evaluations=self._evaluations, seconds=self._seconds, last_metrics=self._last_metrics)

    async def _drive(self) -> None:
        try:
            if not await self._resume():
                await self._begin()
            await self._learn()
        except asyncio.CancelledError:
            if self._step > 0 and self._saved_step != self._step:
                await self._save()
            raise

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Write the trace of the body, also when it raises; its own error is the one that is told then."""
        try:
            yield
        except BaseException:
            with suppress(MachineError):
                self._spans.write_trace(self._folder.trace(self._first_step))
            raise
        self._spans.write_trace(self._folder.trace(self._first_step))

    async def _begin(self) -> None:
        """Push, evaluate, and the supervised phase if there is one."""
        await self._push()
        await self._evaluate("before")
        steps = self._config.run.supervised_steps
        if steps == 0:
            return
        demonstrator = self._parts.environment
        if not isinstance(demonstrator, Demonstrator):
            raise UserError(
                "run-supervised",
                "the environment knows no right answers to learn from",
                f"environment.name = {self._config.environment.name!r}",
                "set run.supervised_steps = 0",
            )
        begun = time.monotonic()
        with self._progress.phase("supervised", total=steps) as phase:
            for step in range(1, steps + 1):
                prompts = self._stream.take(self._config.run.supervised_samples)
                report = await self._parts.trainer.supervise(
                    [_demonstration(p, demonstrator) for p in prompts]
                )
                self._metrics.log(step, report.metrics)
                phase.update(step, report.metrics)
                await asyncio.sleep(0)
        self._seconds["supervised"] = time.monotonic() - begun
        await self._push()
        await self._evaluate("after_supervised")

    async def _learn(self) -> None:
        begun = time.monotonic()
        run = self._config.run
        self._spans.take()
        with self._progress.phase("RL", total=run.steps, start=self._step) as phase:
            while self._step < run.steps:
                await self._one_step(phase)
        self._seconds["rl"] = time.monotonic() - begun
        if self._saved_step != self._step:
            await self._save()
        await self._evaluate("after")

    async def _one_step(self, phase: Phase) -> None:
        begun = time.monotonic()
        step = self._step + 1
        with self._spans.span("generate"):
            rollouts = await self._generate(step)
        if self._schedule.records(step):
            with self._spans.span("record"):
                # The trainer still has the weights that sampled them.
                await self._parts.trainer.record(self._folder.rollouts, step, rollouts)
                prune(self._folder.rollouts, self._config.checkpoint.recorded_steps)
        await finished(self._train(step, rollouts, phase, begun=begun))
        if self._schedule.saves(step):
            await self._save()
        if self._schedule.evaluates(step):
            evaluation = await self._evaluate(f"step {step}")
            phase.update(step, evaluation.metrics if evaluation is not None else {})

    async def _train(
        self, step: int, rollouts: Sequence[Rollout[Held]], phase: Phase, *, begun: float
    ) -> None:
        """Learn from the rollouts of a step, push, and write down what came of it. Once begun, a step is
        finished and told: an interrupt waits for it."""
        with self._spans.span("train"):
            reports = await self._parts.trainer.train(rollouts)
        with self._spans.span("push"):
            pushed = await self._push()
        self._step, self._cursor = step, self._stream.state()
        seconds = time.monotonic() - begun
        facts = [fact for rollout in rollouts for fact in rollout.facts]
        metrics = {**_mean_over_steps([r.metrics for r in reports]), **rollout_metrics(facts), **pushed}
        tokens = sum(fact.num_tokens for fact in facts)
        metrics |= {"perf/step_s": seconds, "perf/tokens_per_s": tokens / seconds, **self._spans.take()}
        self._log(step, metrics)
        self._last_metrics = metrics
        phase.update(step, metrics)
        self._note_nothing_learned(len(rollouts), metrics)

    def _note_nothing_learned(self, prompts: int, metrics: Mapping[str, float]) -> None:
        """Say so once when step after step has nothing to learn from."""
        is_idle = metrics.get("rollout/zero_variance_groups") == prompts
        self._idle_steps = self._idle_steps + 1 if is_idle else 0
        if self._idle_steps == IDLE_STEPS:
            self._progress.note(
                f"nothing was learned in {IDLE_STEPS} steps: the samples of every prompt got one reward; "
                "choose an easier task, or warm the model up by run.supervised_steps"
            )

    async def _generate(self, step: int) -> Sequence[Rollout[Held]]:
        prompts = self._stream.take(self._config.data.prompts_per_step)
        seeds = [seed_for(self._config.run.seed, "rollout", step, prompt.id) for prompt in prompts]
        return await self._parts.rollouts.rollout(
            prompts, seeds, n=self._config.data.samples_per_prompt, sampling=self._sampling
        )

    async def _push(self) -> Mapping[str, float]:
        self._version += 1
        return await self._parts.trainer.push([self._parts.engine], self._version)

    async def _evaluate(self, stage: str) -> Evaluation | None:
        """Held-out accuracy under the current weights; None when the run asks for no held-out problem."""
        if self._config.run.eval_prompts == 0:
            return None
        with self._spans.span("evaluate"):
            result = await evaluate(
                self._config, self._parts.environment, self._parts.rollouts, sampling=self._sampling
            )
        self._evaluations[stage] = result
        write_evaluations(self._folder, self._evaluations)
        # The model before its supervised phase is another one; its point would spoil the RL curve.
        if not (stage == "before" and self._config.run.supervised_steps):
            self._log(self._step, result.metrics)
        return result

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.log(step, metrics)
        self._best.see(step, metrics)

    async def _save(self) -> None:
        with self._spans.span("save"):
            facts: dict[str, Json] = {
                "step": self._step, "weight_version": self._version,
                "stream": {"seed": self._cursor.seed, "cursor": self._cursor.cursor},
                "config": config_facts(self._config),
            }  # fmt: skip
            await self._parts.trainer.save(step_path(self._folder.checkpoints, self._step), facts)
            keep = self._config.checkpoint.keep
            rotate(self._folder.checkpoints, newest=self._step, keep=keep, best=self._best.step)
        self._saved_step = self._step
        if self._best.metric and self._best.step is None:
            self._progress.note(f"checkpoint.best: {self._best.metric} has not been measured so far")

    async def _resume(self) -> bool:
        """Restore a checkpoint, if the run is to be resumed and has one, and push it first."""
        found = find_resumption(self._folder, self._config)
        if found is None:
            return False
        try:
            facts = await self._parts.trainer.load(found.path)
        except UserError as error:
            raise naming_the_others(error, self._folder, found.step) from error
        match facts:
            case {
                "step": int(step),
                "weight_version": int(version),
                "stream": {"seed": int(seed), "cursor": int(cursor)},
            } if step == found.step:
                self._step = self._saved_step = step
                self._version = version - 1
                state = StreamState(seed=seed, cursor=cursor)
                self._stream = PromptStream.resume(
                    self._parts.environment, seed=self._config.run.seed, state=state
                )
                self._cursor = state
            case _:
                raise damaged(found.path, "the driver's part of it is broken")
        self._first_step = step
        self._evaluations |= read_evaluations(self._folder, ("before", "after_supervised"))
        is_evaluated = False
        for row in read_metrics(self._folder.metrics):
            self._best.see(row.step, row.values)
            is_evaluated |= row.step == step and "eval/accuracy" in row.values
            if row.step == step and "train/loss" in row.values:
                self._last_metrics = dict(row.values)
        await self._push()
        for line in found.notes():
            self._progress.note(line)
        if self._schedule.evaluates(step) and not is_evaluated:  # the run was ended before it could
            await self._evaluate(f"step {step}")
        if step == self._config.run.steps:
            self._progress.note(f"all {step} steps were done before; raise run.steps to go on")
        return True


def _demonstration(prompt: Prompt, demonstrator: Demonstrator) -> Sample:
    """A right answer as a sample, to be learned token by token."""
    answer = demonstrator.demonstration(prompt)
    tokens = np.concatenate([prompt.tokens, answer]).astype(np.int32)
    total = len(tokens)
    return Sample(
        id=f"{prompt.id}/answer",
        prompt_id=prompt.id,
        tokens=tokens,
        prompt_length=len(prompt.tokens),
        loss_mask=np.arange(total) >= len(prompt.tokens),
        log_probs=np.zeros(total, np.float32),
        weight_versions=np.full(total, -1, np.int32),
        routing=None,
        reward=1.0,
        stop_reason="stop",
    )


def _mean_over_steps(reports: list[Mapping[str, float]]) -> dict[str, float]:
    """Mean over the optimizer steps of a batch, of each metric where it is there."""
    names = dict.fromkeys(name for report in reports for name in report)
    return {name: float(np.mean([report[name] for report in reports if name in report])) for name in names}
