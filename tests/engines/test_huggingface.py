"""The embedded engine: what it promises about samples, weights and its own state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from onroute.core.errors import CheckError, MachineError, UserError
from onroute.core.samples import Completion, SampleRequest
from onroute.core.weights import WeightOffer
from onroute.engines.catalog import ENGINES
from onroute.engines.huggingface import HuggingFaceEngine
from onroute.models.tiny import tiny_model
from onroute.routing.validation import validate_trace

MakeRequest = Callable[..., SampleRequest]
MakeEngine = Callable[..., HuggingFaceEngine]
T = TypeVar("T")


def run(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]


def test_a_completion_carries_tokens_log_probs_route_and_version(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()
    requests = [make_request(n, seed=n, temperature=0.6) for n in (3, 11)]
    for request, got in zip(requests, run(engine.sample(requests)), strict=True):
        assert got.id == request.id
        assert (got.tokens.dtype, got.log_probs.dtype) == (np.int32, np.float32)
        assert got.weight_versions.tolist() == [0] * len(got.tokens)
        assert got.stop_reason == "length"
        total = len(request.prompt_tokens) + len(got.tokens)
        assert got.routing is not None
        validate_trace(
            got.routing, num_tokens=total, layers=(0, 1, 2), num_experts=8, top_k=2, sample_id=got.id
        )
        assert got.routing.valid.tolist() == [True] * (total - 1) + [False]


def test_capture_changes_no_token_and_no_log_prob(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    requests = [make_request(n, seed=n) for n in (2, 9)]
    with_routes, without = (run(make_engine(capture=c).sample(requests)) for c in (True, False))
    assert tokens_of(with_routes) == tokens_of(without)
    for a, b in zip(with_routes, without, strict=True):
        assert np.array_equal(a.log_probs, b.log_probs)
        assert b.routing is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_are_those_of_a_plain_pass_at_the_same_temperature(
    dtype: str, make_engine: MakeEngine, make_request: MakeRequest, log_probs_of: Callable[..., Any]
) -> None:
    engine = make_engine(dtype=dtype)
    request = make_request(9, seed=4, temperature=0.6, max_new_tokens=20)
    (got,) = run(engine.sample([request]))
    reference = tiny_model("qwen3_moe", dtype=getattr(torch, dtype))
    expected = log_probs_of(reference, request, got.tokens, 0.6)
    assert np.abs(got.log_probs - expected).max() < (1e-5 if dtype == "float32" else 0.1)
    assert np.abs(got.log_probs - log_probs_of(reference, request, got.tokens, 1.0)).max() > 0.1


def test_concurrent_callers_share_one_batch(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(capture=False)
    rows: list[int] = []
    engine._model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )

    async def main() -> list[list[Completion]]:
        calls = [engine.sample([make_request(4, seed=i, max_new_tokens=2)]) for i in range(20)]
        return await asyncio.gather(*calls)

    answers = run(main())
    assert rows == [20, 20]
    assert [answer[0].id for answer in answers] == [f"r{i}" for i in range(20)]
    (alone,) = run(engine.sample([make_request(4, seed=7, max_new_tokens=2)]))
    assert alone.tokens.tolist() == answers[7][0].tokens.tolist()


def test_a_batch_is_no_larger_than_configured(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(capture=False, max_batch_size=4)
    rows: list[int] = []
    engine._model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    run(engine.sample([make_request(4, seed=i, max_new_tokens=1) for i in range(10)]))
    assert rows == [4, 4, 2]


def test_a_request_beyond_the_context_is_refused_and_its_neighbours_are_served(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()

    async def main() -> list[Any]:
        calls = [engine.sample([make_request(n, seed=n)]) for n in (4, 505, 504, 0)]
        return await asyncio.gather(*calls, return_exceptions=True)

    fits, too_long, exactly, empty = run(main())
    assert len(fits[0].tokens) == len(exactly[0].tokens) == 8
    assert isinstance(too_long, UserError)
    assert "505 prompt + 8 new tokens exceed the context 512; request r505" in str(too_long)
    assert isinstance(empty, UserError)
    assert "request r0" in str(empty)


def test_logits_that_are_not_finite_are_an_error(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine()
    with torch.no_grad():
        engine._model.get_output_embeddings().weight[5] = float("nan")
    with pytest.raises(CheckError, match=r"engine-log-probs.*request r0, new token 0"):
        run(engine.sample([make_request(4)]))


# Capabilities


def test_capabilities_are_what_the_model_shows(make_engine: MakeEngine) -> None:
    found = run(make_engine().capabilities())
    assert (found.returns_routes, found.moe_layers, found.num_experts, found.top_k) == (True, (0, 1, 2), 8, 2)
    assert found.tempered_log_probs
    assert found.context_length == 512
    without = run(make_engine(capture=False).capabilities())
    assert (without.returns_routes, without.moe_layers) == (False, ())


def test_untempered_log_probs_would_be_noticed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stock = engine._run_batch
    engine._run_batch = lambda requests: stock(  # type: ignore[method-assign]
        [replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests]
    )
    assert not run(engine.capabilities()).tempered_log_probs


def test_capture_on_a_dense_model_is_refused_before_its_weights_are_read(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    tiny_model("qwen3").config.save_pretrained(tmp_path)  # no weights in the folder
    with pytest.raises(UserError, match="dense model"):
        make_engine(path=tmp_path)


def test_a_dense_model_samples_without_capture(
    make_engine: MakeEngine, make_request: MakeRequest, tmp_path: Path
) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    (got,) = run(make_engine(path=tmp_path, capture=False).sample([make_request(4)]))
    assert got.routing is None


def test_a_family_without_sdpa_is_loaded_with_eager_attention(
    make_engine: MakeEngine, make_request: MakeRequest, tmp_path: Path
) -> None:
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    (got,) = run(make_engine(path=tmp_path).sample([make_request(4)]))
    assert got.routing is not None


# Weights


def test_requests_that_come_during_a_pause_wait_for_resume(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()

    async def main() -> None:
        early = asyncio.ensure_future(engine.sample([make_request(4, seed=1)]))
        await asyncio.sleep(0)
        await engine.pause()
        await asyncio.sleep(0)
        assert early.done()
        late = asyncio.ensure_future(engine.sample([make_request(4, seed=2)]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not late.done()
        await engine.resume()
        assert len(await late) == 1

    run(main())


def test_memory_is_given_back_and_reclaimed_with_the_same_weights(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()
    before = run(engine.sample([make_request(4)]))
    run(engine.release_memory())
    for call in (engine.sample([make_request(4)]), engine.health()):
        with pytest.raises(MachineError, match="reclaim_memory"):
            run(call)  # type: ignore[arg-type]
    run(engine.reclaim_memory())
    run(engine.health())
    assert tokens_of(run(engine.sample([make_request(4)]))) == tokens_of(before)


def test_an_update_during_a_release_does_not_reclaim(
    make_engine: MakeEngine,
    make_request: MakeRequest,
    publish: Callable[..., WeightOffer],
    trained: PreTrainedModel,
) -> None:
    engine = make_engine()
    run(engine.release_memory())
    run(engine.update_weights(publish(trained)))
    with pytest.raises(MachineError, match="reclaim_memory"):
        run(engine.health())
    run(engine.reclaim_memory())
    assert run(engine.sample([make_request(4)]))[0].weight_versions[0] == 1


def test_a_closed_engine_answers_with_an_error_also_to_those_who_wait(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()

    async def main() -> list[Any]:
        queued = asyncio.ensure_future(engine.sample([make_request(4)]))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        late, health = engine.sample([make_request(4)]), engine.health()
        return await asyncio.gather(queued, late, health, return_exceptions=True)

    for error in run(main()):
        assert isinstance(error, MachineError)
        assert "the engine is closed" in str(error)


def test_those_who_wait_in_a_pause_learn_of_the_close(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()

    async def main() -> None:
        await engine.pause()
        paused = asyncio.ensure_future(engine.sample([make_request(4)]))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(MachineError, match="closed"):
            await paused

    run(main())


def test_the_catalogue_names_this_engine() -> None:
    entry = ENGINES["huggingface"]
    assert entry.target == f"{HuggingFaceEngine.__module__}:{HuggingFaceEngine.__name__}"
    assert "returns_routes" in entry.properties
