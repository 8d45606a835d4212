"""Prompts and rewards from reasoning-gym: any of its tasks, by name and parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onroute.core.engine import Sampler
from onroute.core.environment import TextCodec
from onroute.core.errors import CheckError, UserError
from onroute.core.samples import Completion, Group, Prompt, Sample, SampleRequest, Split, Tokens
from onroute.core.sampling import SamplingParams
from onroute.core.seeds import seed_for
from onroute.environments.catalog import ReasoningGymOptions
from onroute.environments.renderings import rendering_for
from onroute.environments.tasks import Problem, load_task

_MAX_DRAWS = 256
"""Draws for one prompt before the task counts as too small for the held-out set asked for."""


class ReasoningGym:
    """`Environment` and `Demonstrator` over one reasoning-gym task.

    Held-out prompts differ from each other, and no training prompt equals one of them: a draw whose
    text is taken is drawn again, so that prompt i depends on nothing but the seed and i.

    stop_token_ids: what ends a response; the first one ends a demonstration.
    held_out: number of held-out problems.
    seed: decides all problems.
    Raises `UserError` for an unknown task or parameter, and for a task with too few problems.
    """

    def __init__(
        self,
        options: ReasoningGymOptions,
        *,
        codec: TextCodec,
        stop_token_ids: tuple[int, ...],
        held_out: int,
        seed: int,
    ) -> None:
        self._task = load_task(options.task, options.parameters, seed)
        self._rendering = rendering_for(options.rendering, self._task)
        self._codec = codec
        self._stop_token_ids = stop_token_ids
        self._held_out: dict[str, int] = {}
        for index in range(held_out):
            text, _, draw = self._draw_fresh("held_out", index)
            self._held_out[text] = draw
        self._held_out_draws = tuple(self._held_out.values())
        self._draw_fresh("train", 0)

    def prompt(self, split: Split, index: int) -> Prompt:
        """Prompt `index` of a split.

        Raises `UserError` past the last held-out problem, and when the text cannot be encoded."""
        if index < 0 or (split == "held_out" and index >= len(self._held_out_draws)):
            raise UserError(
                "environment-no-such-prompt",
                f"there is no prompt {index} among {len(self._held_out_draws)} held-out ones",
                f"task {self._task.name}, split {split}",
                "raise run.eval_prompts",
            )
        if split == "held_out":
            draw = self._held_out_draws[index]
            text = self._rendering.prompt(self._problem(split, index, draw))
        else:
            text, _, draw = self._draw_fresh(split, index)
        return Prompt(
            id=f"{self._task.name}/{split}/{index}",
            tokens=self._codec.encode(text),
            text=text,
            metadata={"split": split, "index": index, "draw": draw},
        )

    async def rollout(
        self, prompt: Prompt, sampler: Sampler, *, n: int, sampling: SamplingParams, seed: int
    ) -> Group:
        """`n` scored samples of one prompt; sample i draws from `seed_for(seed, i)`.

        Raises `CheckError` when the sampler answers something else than was asked, and when a
        reward cannot be had: a broken scorer must not pass for a wrong answer.
        """
        problem = self._problem_of(prompt)
        stop = tuple(dict.fromkeys(sampling.stop_token_ids + self._stop_token_ids))
        sampling = SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=stop,
        )
        requests = [
            SampleRequest(
                id=f"{prompt.id}/{i}", prompt_tokens=prompt.tokens, sampling=sampling, seed=seed_for(seed, i)
            )
            for i in range(n)
        ]
        completions = await sampler.sample(requests)
        _check_answers(requests, completions)
        return Group(
            prompt=prompt,
            samples=tuple(
                _sample(prompt, completion, self._reward(prompt, problem, completion, stop))
                for completion in completions
            ),
        )

    def demonstration(self, prompt: Prompt) -> Tokens:
        """The response ids of a right answer, the stop token included; int32 [num_tokens].

        Raises `UserError` when the task tells no answer or the run has no stop token."""
        if not self._stop_token_ids:
            raise UserError(
                "environment-no-stop-token",
                "a demonstration must end with a stop token and there is none",
                f"prompt {prompt.id}",
                "set the end-of-sequence token in the model's generation config",
            )
        answer = self._codec.encode(self._rendering.answer(self._problem_of(prompt)))
        return np.append(answer, np.int32(self._stop_token_ids[0])).astype(np.int32)

    def _reward(
        self, prompt: Prompt, problem: Problem, completion: Completion, stop: tuple[int, ...]
    ) -> float:
        tokens = completion.tokens
        ended = len(tokens) > 0 and int(tokens[-1]) in stop
        response = self._codec.decode(tokens[:-1] if ended else tokens)
        where = f"prompt {prompt.id}, sample {completion.id}"
        fix = "mend the task's scorer, or choose another task"
        try:
            reward = self._rendering.score(response, problem)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise CheckError("environment-reward-failed", f"scoring raised {reason}", where, fix) from error
        if not math.isfinite(reward):
            raise CheckError("environment-reward-not-finite", f"reward is {reward}", where, fix)
        return reward

    def _draw_fresh(self, split: Split, index: int) -> tuple[str, Problem, int]:
        """The first draw whose text no held-out prompt has: its text, its problem, its number."""
        for draw in range(_MAX_DRAWS):
            problem = self._problem(split, index, draw)
            text = self._rendering.prompt(problem)
            if text not in self._held_out:
                return text, problem, draw
        raise UserError(
            "environment-too-few-problems",
            f"{_MAX_DRAWS} draws gave no problem outside the {len(self._held_out)} held-out ones",
            f"task {self._task.name}, {split} prompt {index}",
            "lower run.eval_prompts, or widen the parameters of the task",
        )

    def _problem(self, split: Split, index: int, draw: int) -> Problem:
        if draw == 0:
            return self._task.problem(split, index)
        # Later draws of one prompt lie side by side, so that the library builds one data set for them.
        return self._task.problem(f"{split}/again", index * _MAX_DRAWS + draw)

    def _problem_of(self, prompt: Prompt) -> Problem:
        match prompt.metadata:
            case {"split": "train" | "held_out" as split, "index": int(index), "draw": int(draw)}:
                problem = self._problem(split, index, draw)
                if self._rendering.prompt(problem) == prompt.text:
                    return problem
        raise CheckError(
            "environment-foreign-prompt",
            "the problem behind a prompt is not the one that was drawn for it",
            f"prompt {prompt.id}",
            "use the task, parameters and run.seed that the prompt was made with; if they are the same, "
            "the task is not reproducible: leave it out",
        )


def _check_answers(requests: Sequence[SampleRequest], completions: Sequence[Completion]) -> None:
    asked = [request.id for request in requests]
    got = [completion.id for completion in completions]
    if asked != got:
        raise CheckError(
            "environment-completions",
            f"asked for {len(asked)} completions, got {len(got)} with other ids or in another order",
            f"first asked {asked[:1]}, first got {got[:1]}",
            "report it: the engine broke its contract",
        )
    for completion in completions:
        lengths = {len(completion.tokens), len(completion.log_probs), len(completion.weight_versions)}
        if len(lengths) != 1 or 0 in lengths:
            raise CheckError(
                "environment-completions",
                f"{len(completion.tokens)} tokens, {len(completion.log_probs)} log-probs and "
                f"{len(completion.weight_versions)} weight versions do not make a completion",
                f"sample {completion.id}",
                "report it: the engine broke its contract",
            )


def _sample(prompt: Prompt, completion: Completion, reward: float) -> Sample:
    prompt_length, num_new = len(prompt.tokens), len(completion.tokens)
    return Sample(
        id=completion.id,
        prompt_id=prompt.id,
        tokens=np.concatenate([prompt.tokens, completion.tokens]).astype(np.int32),
        prompt_length=prompt_length,
        loss_mask=np.arange(prompt_length + num_new) >= prompt_length,
        log_probs=np.concatenate([np.zeros(prompt_length, np.float32), completion.log_probs]).astype(
            np.float32
        ),
        weight_versions=np.concatenate(
            [np.full(prompt_length, -1, np.int32), completion.weight_versions]
        ).astype(np.int32),
        routing=completion.routing,
        reward=reward,
        stop_reason=completion.stop_reason,
    )
