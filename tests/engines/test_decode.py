"""The decoding loop against plain forward passes: tokens, log-probs, routes, ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from onroute.core.samples import SampleRequest, Tokens
from onroute.engines.capture import RouteCapture
from onroute.engines.decode import decode
from onroute.engines.tape import Continuation
from onroute.models.tiny import tiny_model

MakeRequest = Callable[..., SampleRequest]
FAMILIES = ("qwen3_moe", "qwen3_5_moe_text", "glm4_moe_lite", "deepseek_v3", "deepseek_v2", "gpt_oss")


def routes_of(model: PreTrainedModel, capture: RouteCapture, tokens: Tokens) -> Any:
    """[num_tokens, num_layers, top_k] of one unpadded, uncached pass over the whole sequence."""
    ids = torch.tensor(tokens[None].astype(np.int64))
    with torch.no_grad(), capture.recorder.recording() as record:
        model(input_ids=ids, use_cache=False)
    return record.ids.transpose(0, 1).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_any_lengths_match_plain_passes(
    family: str, make_request: MakeRequest, log_probs_of: Callable[..., Any]
) -> None:
    model = tiny_model(family)
    capture = RouteCapture(model)
    # Rows end at different steps, so that the batch shrinks to two rows and then to one on the way.
    shapes = [(1, 9, 1.0), (5, 20, 0.7), (17, 3, 1.3), (17, 4, 1.0), (40, 5, 1.0)]
    requests = [
        make_request(length, seed=i, max_new_tokens=new, temperature=temperature)
        for i, (length, new, temperature) in enumerate(shapes)
    ]
    for request, got in zip(requests, decode(model, requests, capture=capture), strict=True):
        temperature = request.sampling.temperature
        assert len(got.tokens) == request.sampling.max_new_tokens
        expected = log_probs_of(model, request, got.tokens, temperature)
        np.testing.assert_allclose(got.log_probs, expected, atol=1e-5)
        routes = routes_of(model, capture, np.concatenate([request.prompt_tokens, got.tokens]))
        # The last token was sampled and never fed.
        assert np.array_equal(got.routes, routes[:-1])
    capture.remove()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 300])
def test_a_prompt_longer_than_one_prefill_pass_gives_the_routes_of_one_pass(
    family: str, length: int, make_request: MakeRequest
) -> None:
    model = tiny_model(family)
    capture = RouteCapture(model)
    requests = [make_request(length, seed=1, max_new_tokens=2), make_request(7, seed=2, max_new_tokens=2)]
    pieces: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: pieces.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    got = decode(model, requests, capture=capture, prefill_tokens=64)  # 32 columns of two rows
    hook.remove()
    assert max(pieces) <= 32
    for request, continuation in zip(requests, got, strict=True):
        tokens = np.concatenate([request.prompt_tokens, continuation.tokens])
        assert len(continuation.routes) == len(tokens) - 1  # type: ignore[arg-type]
        assert np.array_equal(continuation.routes, routes_of(model, capture, tokens)[:-1])
    capture.remove()


def test_greedy_decoding_equals_generate(model: PreTrainedModel, make_request: MakeRequest) -> None:
    requests = [make_request(n, seed=n, temperature=0.0, max_new_tokens=12) for n in (1, 5, 17)]
    for request, got in zip(requests, decode(model, requests), strict=True):
        ids = torch.from_numpy(request.prompt_tokens.astype(np.int64))[None]
        expected = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert got.tokens.tolist() == expected[0, len(request.prompt_tokens) :].tolist()


def test_tokens_do_not_depend_on_the_rest_of_the_batch(
    model: PreTrainedModel, make_request: MakeRequest
) -> None:
    requests = [make_request(1 + 7 * i, seed=i, max_new_tokens=4 + 3 * i) for i in range(6)]
    together = decode(model, requests)
    backwards = decode(model, requests[::-1])[::-1]
    for request, a, b in zip(requests, together, backwards, strict=True):
        (alone,) = decode(model, [request])
        assert alone.tokens.tolist() == a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(alone.log_probs, a.log_probs, atol=1e-5)


def test_tokens_depend_on_the_seed_of_their_own_request(
    model: PreTrainedModel, make_request: MakeRequest
) -> None:
    same_prompt = [make_request(prompt=[5, 6, 7], seed=seed, max_new_tokens=20) for seed in (1, 2, 1)]
    a, b, c = (got.tokens.tolist() for got in decode(model, same_prompt))
    assert a == c
    assert a != b


def test_a_longer_limit_continues_the_same_sample(model: PreTrainedModel, make_request: MakeRequest) -> None:
    short, long = (make_request(5, seed=1, max_new_tokens=n) for n in (4, 15))
    (a,), (b,) = decode(model, [short]), decode(model, [long])
    assert b.tokens[:4].tolist() == a.tokens.tolist()


def stopping(model: PreTrainedModel, make_request: MakeRequest, **sampling: Any) -> Continuation:
    (got,) = decode(model, [make_request(5, seed=3, max_new_tokens=20, **sampling)])
    return got


def test_each_of_several_stop_ids_ends_the_sample_and_is_kept(
    model: PreTrainedModel, make_request: MakeRequest
) -> None:
    free = stopping(model, make_request)
    tokens = free.tokens.tolist()
    assert free.stop_reason == "length"
    assert len(tokens) == 20
    for position in (0, 4, 9):
        first = tokens.index(tokens[position])
        absent = [i for i in range(128) if i not in tokens]
        got = stopping(model, make_request, stop_token_ids=(absent[0], tokens[position], absent[1]))
        assert got.tokens.tolist() == tokens[: first + 1]
        assert got.log_probs.tolist() == free.log_probs[: first + 1].tolist()
        assert got.stop_reason == "stop"


def test_a_stop_id_equal_to_the_padding_id_is_found_and_kept(
    model: PreTrainedModel, make_request: MakeRequest
) -> None:
    # Id 0 pads the short prompt on the left and is part of it too; only a sampled 0 ends a sample.
    found = next(
        seed
        for seed in range(200)
        if 0 in decode(model, [make_request(prompt=[0, 5, 0], seed=seed, max_new_tokens=10)])[0].tokens[1:]
    )
    request = make_request(prompt=[0, 5, 0], seed=found, max_new_tokens=10, stop_token_ids=(0,))
    longer = make_request(30, seed=500, max_new_tokens=10)
    got, _ = decode(model, [request, longer])
    assert got.tokens[-1] == 0
    assert 0 not in got.tokens[:-1]
    assert got.stop_reason == "stop"


def test_a_stop_token_at_the_limit_counts_as_stopped(
    model: PreTrainedModel, make_request: MakeRequest
) -> None:
    (free,) = decode(model, [make_request(5, seed=3, max_new_tokens=1)])
    stop = (int(free.tokens[0]),)
    (got,) = decode(model, [make_request(5, seed=3, max_new_tokens=1, stop_token_ids=stop)])
    assert (free.stop_reason, got.stop_reason) == ("length", "stop")


def test_decoding_ends_when_every_row_has_ended(model: PreTrainedModel, make_request: MakeRequest) -> None:
    passes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    try:
        limits = [1, 1, 1, 3]
        decode(model, [make_request(4, seed=i, max_new_tokens=n) for i, n in enumerate(limits)])
    finally:
        hook.remove()
    # The prompts, then two steps of the one row that is left.
    assert passes == [4, 1, 1]


def test_samples_longer_than_one_block_of_steps_are_whole(
    model: PreTrainedModel, make_request: MakeRequest, log_probs_of: Callable[..., Any]
) -> None:
    capture = RouteCapture(model)
    try:
        request = make_request(3, seed=1, max_new_tokens=300)
        (got,) = decode(model, [request], capture=capture)
        np.testing.assert_allclose(got.log_probs, log_probs_of(model, request, got.tokens, 1.0), atol=1e-5)
        routes = routes_of(model, capture, np.concatenate([request.prompt_tokens, got.tokens]))
        assert np.array_equal(got.routes, routes[:-1])
    finally:
        capture.remove()


def test_stock_models_are_called_without_warnings(make_request: MakeRequest) -> None:
    model = tiny_model("qwen3_moe")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(model, [make_request(4, max_new_tokens=3), make_request(2, max_new_tokens=3)])


def test_without_capture_there_are_no_routes(model: PreTrainedModel, make_request: MakeRequest) -> None:
    assert decode(model, [make_request(4)])[0].routes is None
