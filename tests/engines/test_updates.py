"""The embedded engine: weights are taken whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from onroute.core.errors import CheckError, MachineError
from onroute.core.samples import Completion, SampleRequest
from onroute.core.weights import WeightOffer
from onroute.engines.huggingface import HuggingFaceEngine
from onroute.models.names import PublishedLayout
from onroute.models.tiny import tiny_model
from onroute.weights.local import LocalExchange

MakeRequest = Callable[..., SampleRequest]
MakeEngine = Callable[..., HuggingFaceEngine]
T = TypeVar("T")


def run(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]


def broken_after(layout: PublishedLayout, count: int) -> Callable[[], Iterator[dict[str, torch.Tensor]]]:
    def units() -> Iterator[dict[str, torch.Tensor]]:
        for i, unit in enumerate(layout.tensors()):
            if i == count:
                raise RuntimeError("the sender broke")
            yield unit

    return units


# Sampling


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
