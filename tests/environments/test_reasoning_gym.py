from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from onroute.core.errors import CheckError, UserError
from onroute.core.samples import Prompt
from onroute.core.sampling import SamplingParams
from onroute.core.seeds import seed_for

SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(77,))


def roll(environment, prompt, sampler, n=1, seed=0):
    return asyncio.run(environment.rollout(prompt, sampler, n=n, sampling=SAMPLING, seed=seed))


def test_prompts_are_stable_and_their_ids_tell_where_they_come_from(sorting, make_environment):
    prompt = sorting.prompt("train", 17)
    assert prompt.id == "number_sorting/train/17"
    again = make_environment().prompt("train", 17)
    assert (again.text, again.tokens.tolist()) == (prompt.text, prompt.tokens.tolist())
    assert make_environment(seed=1).prompt("train", 17).text != prompt.text


def test_no_training_prompt_equals_a_held_out_one_even_when_half_of_all_problems_are_held_out(
    make_environment,
):
    # One digit of ten and two directions are 20 problems; 10 of them are held out.
    parameters = {"min_numbers": 1, "max_numbers": 1, "min_decimals": 0, "max_decimals": 0}
    parameters |= {"min_value": -0.49, "max_value": 9.49}
    environment = make_environment(parameters=parameters, held_out=10)
    held_out = [environment.prompt("held_out", i).text for i in range(10)]
    trained = [environment.prompt("train", i).text for i in range(300)]
    assert len(set(held_out)) == 10
    assert len(set(trained)) == 10
    assert not set(held_out) & set(trained)
    assert any(environment.prompt("train", i).metadata["draw"] > 0 for i in range(300))


def test_a_task_with_too_few_problems_is_refused_at_start(make_environment):
    parameters = {"min_numbers": 1, "max_numbers": 1, "min_decimals": 0, "max_decimals": 0}
    parameters |= {"min_value": -0.49, "max_value": 9.49}
    with pytest.raises(UserError, match=r"environment-too-few-problems.*20 held-out"):
        make_environment(parameters=parameters, held_out=20)  # leaves nothing to train on
    with pytest.raises(UserError, match="environment-too-few-problems"):
        make_environment(parameters=parameters, held_out=21)


def test_a_prompt_past_the_last_held_out_one_is_refused(sorting):
    assert sorting.prompt("held_out", 19)
    with pytest.raises(UserError, match=r"environment-no-such-prompt.*20"):
        sorting.prompt("held_out", 20)
    with pytest.raises(UserError, match="environment-no-such-prompt"):
        sorting.prompt("train", -1)


def test_a_demonstration_is_the_right_answer_with_the_stop_token_and_earns_1(sorting, scripted, codec):
    for prompt in [sorting.prompt("train", 0), sorting.prompt("held_out", 3)]:
        response = sorting.demonstration(prompt)
        assert response.dtype == np.int32
        text = codec.decode(response)
        order = sorted(prompt.text[2:7], reverse=prompt.text[1] == "d")
        assert text == "".join(order) + "$"
        assert roll(sorting, prompt, scripted(lambda _, r=response: r)).samples[0].reward == 1.0


def test_each_sample_draws_from_its_own_seed_with_the_stop_tokens_of_both(sorting, scripted):
    sampler = scripted(lambda _: [9, 0])
    prompt = sorting.prompt("train", 0)
    roll(sorting, prompt, sampler, n=3, seed=42)
    assert [r.seed for r in sampler.requests] == [seed_for(42, 0), seed_for(42, 1), seed_for(42, 2)]
    assert [r.id for r in sampler.requests] == [f"number_sorting/train/0/{i}" for i in range(3)]
    sampling = sampler.requests[0].sampling
    assert sampling.stop_token_ids == (77, 0)
    assert (sampling.max_new_tokens, sampling.temperature) == (6, 0.7)
    assert (sampling.top_p, sampling.top_k) == (0.9, 5)


def test_a_sample_is_prompt_and_completion_untouched(sorting, scripted):
    prompt = sorting.prompt("train", 0)
    (sample,) = roll(sorting, prompt, scripted(lambda _: [20, 21, 0])).samples
    # 8 prompt tokens and 3 sampled ones; log-probs and version as the sampler gave them.
    assert sample.tokens.tolist() == [*prompt.tokens.tolist(), 20, 21, 0]
    assert sample.tokens.dtype == np.int32
    assert sample.prompt_length == 8
    assert sample.loss_mask.tolist() == [False] * 8 + [True] * 3
    assert sample.log_probs.tolist() == [0.0] * 8 + [-1.0, -2.0, -3.0]
    assert sample.log_probs.dtype == np.float32
    assert sample.weight_versions.tolist() == [-1] * 8 + [3] * 3
    assert sample.routing.num_tokens == 11
    assert (sample.prompt_id, sample.stop_reason) == (prompt.id, "stop")


def test_only_a_stop_token_at_the_end_is_left_out_of_the_answer(sorting, scripted, codec):
    prompt = sorting.prompt("train", 0)
    right = sorting.demonstration(prompt).tolist()
    scripts = {
        0: right,
        1: right[:-1],
        2: [0, *right],
        3: [*right[:-1], 0, 0],
        4: [*right[:2], 0, *right[2:]],
    }
    rewards = [s.reward for s in roll(sorting, prompt, scripted(scripts.__getitem__), n=5).samples]
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_scores_are_the_same_in_a_thread_and_in_concurrent_tasks(sorting, scripted):
    prompt = sorting.prompt("train", 0)
    right = sorting.demonstration(prompt)

    async def many():
        calls = [
            sorting.rollout(prompt, scripted(lambda _: right), n=1, sampling=SAMPLING, seed=i)
            for i in range(4)
        ]
        return [group.samples[0].reward for group in await asyncio.gather(*calls)]

    found = []
    thread = threading.Thread(target=lambda: found.extend(asyncio.run(many())))
    thread.start()
    thread.join()
    assert found == [1.0] * 4


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (lambda *_: float("nan"), "environment-reward-not-finite"),
        (lambda *_: float("inf"), "environment-reward-not-finite"),
        (lambda *_: 1 / 0, "environment-reward-failed.*ZeroDivisionError"),
        (lambda *_: None, "environment-reward-failed.*TypeError"),
    ],
)
def test_a_broken_scorer_stops_the_run_and_names_prompt_and_sample(
    make_environment, scripted, monkeypatch, broken, code
):
    from reasoning_gym.arithmetic.basic_arithmetic import BasicArithmeticDataset

    environment = make_environment(task="basic_arithmetic", rendering="plain", held_out=1)
    monkeypatch.setattr(BasicArithmeticDataset, "score_answer", broken)
    with pytest.raises(CheckError, match=f"{code}.*basic_arithmetic/train/4.*basic_arithmetic/train/4/0"):
        roll(environment, environment.prompt("train", 4), scripted(lambda _: [20, 0]))


def test_a_prompt_of_another_run_is_refused(sorting, make_environment, scripted):
    foreign = make_environment(seed=9).prompt("train", 0)
    with pytest.raises(CheckError, match="environment-foreign-prompt"):
        roll(sorting, foreign, scripted(lambda _: [0]))
    bare = Prompt(id="x", tokens=foreign.tokens, text=foreign.text)
    with pytest.raises(CheckError, match="environment-foreign-prompt"):
        sorting.demonstration(bare)


def test_an_engine_that_loses_or_swaps_completions_is_refused(sorting, scripted):
    class Losing(scripted):
        async def sample(self, requests):
            return (await super().sample(requests))[:-1]

    class Swapping(scripted):
        async def sample(self, requests):
            return (await super().sample(requests))[::-1]

    prompt = sorting.prompt("train", 0)
    for broken in (Losing, Swapping):
        with pytest.raises(CheckError, match="environment-completions"):
            roll(sorting, prompt, broken(lambda _: [9, 0]), n=2)
    with pytest.raises(CheckError, match=r"environment-completions.*0 tokens"):
        roll(sorting, prompt, scripted(lambda _: []))


def test_a_demonstration_without_any_stop_token_is_refused(make_environment):
    environment = make_environment(stop=(), held_out=1)
    with pytest.raises(UserError, match="environment-no-stop-token"):
        environment.demonstration(environment.prompt("train", 0))


@pytest.mark.parametrize(
    "task", ["spell_backward", "basic_arithmetic", "chain_sum", "gsm_symbolic", "countdown"]
)
def test_the_told_answer_earns_1_in_plain_rendering(make_environment, scripted, task):
    environment = make_environment(task=task, rendering="plain", held_out=2)
    prompt = environment.prompt("held_out", 1)
    right = environment.demonstration(prompt)
    assert roll(environment, prompt, scripted(lambda _: right)).samples[0].reward == 1.0
