"""What a driver does now and then: save, evaluate, record."""

from __future__ import annotations

from dataclasses import dataclass

from onroute.core.config.sections import RunConfig
from onroute.orchestration.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Schedule:
    """Says after which steps something is due, by the run file or because the user asks for it."""

    config: RunConfig
    folder: RunFolder

    def saves(self, step: int) -> bool:
        """A file `save` in the run folder asks for a checkpoint after the step at hand; it is taken away
        before the checkpoint is begun, so that a request that comes meanwhile is one for the next step."""
        try:
            self.folder.save_request.unlink()
        except FileNotFoundError:
            every = self.config.checkpoint.every
            return every > 0 and step % every == 0
        return True

    def evaluates(self, step: int) -> bool:
        """Between the steps of a run; before the first and after the last it evaluates anyway."""
        every, prompts = self.config.run.eval_every, self.config.run.eval_prompts
        return every > 0 and prompts > 0 and step % every == 0 and 0 < step < self.config.run.steps

    def records(self, step: int) -> bool:
        """The rollouts of every so many steps are kept, and those of the last ones."""
        checkpoint = self.config.checkpoint
        due = step % checkpoint.record_every == 0 or step > self.config.run.steps - checkpoint.recorded_steps
        return due and checkpoint.recorded_steps > 0
