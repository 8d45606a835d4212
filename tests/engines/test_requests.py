"""What cannot be served is refused by name; what an engine returns is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onroute.core.errors import CheckError, UserError
from onroute.core.samples import Completion, SampleRequest
from onroute.engines.requests import check_completion, check_request


def check(request: SampleRequest) -> None:
    check_request(request, context_length=20, vocab_size=128)


def test_a_request_that_fills_the_context_exactly_is_served(
    make_request: Callable[..., SampleRequest],
) -> None:
    check(make_request(12, max_new_tokens=8))


@pytest.mark.parametrize(
    ("prompt", "sampling", "code"),
    [
        ([1] * 13, {}, r"engine-context\] 13 prompt \+ 8 new tokens exceed the context 20"),
        ([], {}, "engine-empty-prompt"),
        ([5, 128], {}, "engine-prompt-ids"),
        ([-1, 5], {}, "engine-prompt-ids"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([5], {"temperature": -0.1}, "temperature = -0.1"),
        ([5], {"temperature": float("nan")}, "temperature = nan"),
        ([5], {"temperature": float("inf")}, "temperature = inf"),
        ([5], {"top_p": 0.0}, "top_p = 0.0"),
        ([5], {"top_p": 1.1}, "top_p = 1.1"),
        ([5], {"top_k": 0}, "top_k = 0"),
    ],
)
def test_a_bad_request_is_refused_by_its_id(
    make_request: Callable[..., SampleRequest], prompt: list[int], sampling: dict[str, Any], code: str
) -> None:
    with pytest.raises(UserError, match=code) as refusal:
        check(make_request(prompt=prompt, seed=3, **sampling))
    assert "request r3" in str(refusal.value)


def completion(log_probs: list[float], num_tokens: int) -> Completion:
    return Completion(
        id="r7",
        tokens=np.arange(num_tokens, dtype=np.int32),
        log_probs=np.array(log_probs, dtype=np.float32),
        routing=None,
        stop_reason="abort" if num_tokens == 0 else "length",
        weight_versions=np.zeros(num_tokens, dtype=np.int32),
    )


@pytest.mark.parametrize("log_probs", [[-0.1, -4.0], [0.0], []], ids=["usual", "certain", "aborted at once"])
def test_an_answer_with_a_log_prob_for_each_token_is_accepted(log_probs: list[float]) -> None:
    check_completion(completion(log_probs, len(log_probs)))


def test_fewer_log_probs_than_tokens_are_refused() -> None:
    with pytest.raises(CheckError, match="5 tokens came with 4 log-probs; request r7"):
        check_completion(completion([-0.1] * 4, 5))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 0.5])
def test_a_log_prob_that_is_none_is_refused_at_its_position(bad: float) -> None:
    with pytest.raises(CheckError, match="request r7, new token 2"):
        check_completion(completion([-0.1, -0.2, bad], 3))
