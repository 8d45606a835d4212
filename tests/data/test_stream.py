from __future__ import annotations

import numpy as np
import pytest

from onroute.core.errors import CheckError, UserError
from onroute.core.samples import Prompt
from onroute.data.stream import PromptStream, StreamState


class Numbers:
    """Prompt i of the train split is called by its number; `period` makes ids come again."""

    def __init__(self, period: int = 10**9) -> None:
        self.period = period

    def prompt(self, split, index):
        assert split == "train"
        return Prompt(id=str(index % self.period), tokens=np.array([index], dtype=np.int32), text="")

    async def rollout(self, prompt, sampler, *, n, sampling, seed):
        raise NotImplementedError


def ids(prompts):
    return [int(prompt.id) for prompt in prompts]


def test_prompts_come_in_order_and_never_twice():
    stream = PromptStream(Numbers(), seed=1)
    assert [ids(stream.take(n)) for n in (3, 0, 2)] == [[0, 1, 2], [], [3, 4]]


def test_a_resumed_stream_goes_on_where_it_stopped():
    stream = PromptStream(Numbers(), seed=1, cursor=7)
    stream.take(2)
    state = stream.state()
    assert state == StreamState(seed=1, cursor=9)
    assert ids(PromptStream.resume(Numbers(), seed=1, state=state).take(2)) == ids(stream.take(2)) == [9, 10]


def test_a_state_of_another_seed_is_refused():
    with pytest.raises(UserError, match="run has seed 2, its checkpoint 1"):
        PromptStream.resume(Numbers(), seed=2, state=StreamState(seed=1, cursor=9))


def test_two_prompts_of_one_id_in_a_batch_are_refused_and_not_consumed():
    stream = PromptStream(Numbers(period=3), seed=0)
    with pytest.raises(CheckError, match="prompts 0 and 3 share an id; prompt 0"):
        stream.take(4)
    assert stream.state().cursor == 0
