"""The embedded engine: what it promises about samples, weights and its own state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
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
from onroute.models.names import PublishedLayout
from onroute.models.tiny import tiny_model
from onroute.routing.validation import validate_trace
from onroute.weights.local import LocalExchange

MakeRequest = Callable[..., SampleRequest]
MakeEngine = Callable[..., HuggingFaceEngine]
T = TypeVar("T")


def run(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]


@pytest.fixture(scope="module")
def trained() -> PreTrainedModel:
    """Another model of the same shape, as a trainer would hold it: float32."""
    return tiny_model("qwen3_moe", seed=1)


@pytest.fixture
def publish(exchange: LocalExchange) -> Callable[..., WeightOffer]:
    def offer(model: PreTrainedModel, version: int = 1) -> WeightOffer:
        layout = PublishedLayout(model)
        return exchange.publish(version, layout.specs, layout.tensors)

    return offer


def broken_after(layout: PublishedLayout, count: int) -> Callable[[], Iterator[dict[str, torch.Tensor]]]:
    def units() -> Iterator[dict[str, torch.Tensor]]:
        for i, unit in enumerate(layout.tensors()):
            if i == count:
                raise RuntimeError("the sender broke")
            yield unit

    return units


# Sampling


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


@pytest.mark.parametrize("max_bytes", [1 << 10, 1 << 16, 1 << 30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_an_update_every_parameter_is_the_cast_source_bit_for_bit(
    max_bytes: int, dtype: str, make_engine: MakeEngine, trained: PreTrainedModel
) -> None:
    exchange = LocalExchange(max_bytes)
    engine = make_engine(dtype=dtype, exchange=exchange)
    layout = PublishedLayout(trained)
    offer = exchange.publish(1, layout.specs, layout.tensors)
    receipt = run(engine.update_weights(offer))
    assert receipt == exchange.finish(offer)
    assert receipt.num_tensors == len(layout.specs)
    held, source = engine._model.state_dict(), trained.state_dict()
    assert held.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(held[name], tensor.to(held[name].dtype)), name


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_5_moe_text"])
def test_other_families_take_an_update_whole(
    family: str, make_engine: MakeEngine, publish: Callable[..., WeightOffer], tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    engine, source = make_engine(path=tmp_path), tiny_model(family, seed=1)
    run(engine.update_weights(publish(source)))
    held = engine._model.state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in source.state_dict().items())


def test_after_an_update_nothing_of_the_old_weights_is_left(
    make_engine: MakeEngine,
    make_request: MakeRequest,
    publish: Callable[..., WeightOffer],
    trained: PreTrainedModel,
    tmp_path: Path,
) -> None:
    trained.save_pretrained(tmp_path)
    engine, fresh = make_engine(), make_engine(path=tmp_path)
    requests = [make_request(n, seed=n) for n in (3, 12)]
    before = run(engine.sample(requests))
    run(engine.update_weights(publish(trained)))
    after, expected = run(engine.sample(requests)), run(fresh.sample(requests))
    assert tokens_of(after) == tokens_of(expected) != tokens_of(before)
    for a, b in zip(after, expected, strict=True):
        assert np.array_equal(a.log_probs, b.log_probs)
        assert a.routing is not None
        assert b.routing is not None
        assert np.array_equal(a.routing.experts, b.routing.experts)
        assert a.weight_versions.tolist() == [1] * len(a.tokens)


@pytest.mark.parametrize("failure", ["sender", "cancelled"])
def test_a_half_taken_update_refuses_sampling_until_a_whole_one(
    failure: str,
    make_engine: MakeEngine,
    make_request: MakeRequest,
    exchange: LocalExchange,
    publish: Callable[..., WeightOffer],
    trained: PreTrainedModel,
) -> None:
    engine, layout = make_engine(), PublishedLayout(trained)

    async def break_off() -> None:
        if failure == "sender":
            offer = exchange.publish(1, layout.specs, broken_after(layout, 4))
            with pytest.raises(RuntimeError, match="the sender broke"):
                await engine.update_weights(offer)
        else:
            update = asyncio.ensure_future(engine.update_weights(publish(trained)))
            for _ in range(4):
                await asyncio.sleep(0)
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update

    run(break_off())
    assert exchange._open == {}
    with pytest.raises(CheckError, match=r"engine-weights-incomplete.*push all weights again"):
        run(engine.sample([make_request(4)]))
    with pytest.raises(MachineError, match="did not arrive whole"):
        run(engine.health())
    receipt = run(engine.update_weights(publish(trained)))  # the same version again
    assert receipt.version == 1
    run(engine.health())
    assert run(engine.sample([make_request(4)]))[0].weight_versions[0] == 1


def test_nothing_is_sampled_while_an_update_runs(
    make_engine: MakeEngine,
    make_request: MakeRequest,
    publish: Callable[..., WeightOffer],
    trained: PreTrainedModel,
) -> None:
    engine = make_engine()

    async def main() -> list[Any]:
        waiting = asyncio.ensure_future(engine.sample([make_request(4)]))
        update = asyncio.ensure_future(engine.update_weights(publish(trained)))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(engine.sample([make_request(4)]))
        return await asyncio.gather(waiting, late, update, return_exceptions=True)

    waiting, late, receipt = run(main())
    assert isinstance(waiting, CheckError)
    assert isinstance(late, CheckError)
    assert receipt.version == 1


def test_an_offer_that_leaves_a_parameter_out_is_refused_by_name(
    make_engine: MakeEngine, make_request: MakeRequest, exchange: LocalExchange, trained: PreTrainedModel
) -> None:
    engine, layout = make_engine(), PublishedLayout(trained)
    left_out = layout.parameters[3]
    specs = [spec for spec in layout.specs if spec.name not in left_out.published]

    def units() -> Iterator[dict[str, torch.Tensor]]:
        return (unit for unit in layout.tensors() if left_out.published[0] not in unit)

    with pytest.raises(CheckError, match=rf"engine-weights-missing.* 1 of .*{left_out.name}"):
        run(engine.update_weights(exchange.publish(1, specs, units)))
    with pytest.raises(CheckError, match="engine-weights-incomplete"):
        run(engine.sample([make_request(4)]))


def test_a_name_this_model_does_not_have_is_refused_and_the_offer_is_void(
    make_engine: MakeEngine,
    make_request: MakeRequest,
    exchange: LocalExchange,
    publish: Callable[..., WeightOffer],
) -> None:
    engine, offer = make_engine(), publish(tiny_model("deepseek_v3"))
    with pytest.raises(CheckError, match=r"unknown tensor.*model\.layers\.\d") as refusal:
        run(engine.update_weights(offer))
    # Also while the traceback is alive and holds the engine's end of the stream.
    assert refusal.tb is not None
    with pytest.raises(CheckError, match="weights-no-offer"):
        next(exchange.receive(offer))
    with pytest.raises(CheckError, match="engine-weights-incomplete"):
        run(engine.sample([make_request(4)]))


def test_versions_only_grow(
    make_engine: MakeEngine,
    make_request: MakeRequest,
    publish: Callable[..., WeightOffer],
    trained: PreTrainedModel,
) -> None:
    engine = make_engine()
    run(engine.update_weights(publish(trained, 4)))
    for version in (4, 3):
        with pytest.raises(CheckError, match=f"version {version} was offered while version 4 is held"):
            run(engine.update_weights(publish(trained, version)))
    # Refused before the first bucket, so the engine still serves.
    assert run(engine.sample([make_request(4)]))[0].weight_versions[0] == 4
    assert run(engine.update_weights(publish(trained, 9))).version == 9


def test_an_offer_that_is_gone_leaves_the_engine_as_it_was(
    make_engine: MakeEngine,
    make_request: MakeRequest,
    exchange: LocalExchange,
    publish: Callable[..., WeightOffer],
    trained: PreTrainedModel,
) -> None:
    engine, offer = make_engine(), publish(trained)
    exchange.withdraw(offer)
    with pytest.raises(CheckError, match="weights-no-offer"):
        run(engine.update_weights(offer))
    assert run(engine.sample([make_request(4)]))[0].weight_versions[0] == 0


# Lifecycle


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
