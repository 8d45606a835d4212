"""An offer is taken whole and accounted for on both sides, or it is void."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from onroute.core.errors import CheckError
from onroute.core.weights import WeightOffer
from onroute.weights.checksum import spec_of
from onroute.weights.local import LocalExchange

MODEL = {"a": torch.arange(4.0), "b": torch.arange(6.0).view(2, 3).t(), "c": torch.tensor(2)}
SPECS = [spec_of(name, tensor) for name, tensor in MODEL.items()]


def units() -> Iterator[dict[str, torch.Tensor]]:
    for name, tensor in MODEL.items():
        yield {name: tensor}


def failing_units() -> Iterator[dict[str, torch.Tensor]]:
    yield {"a": MODEL["a"]}
    raise RuntimeError("the sender broke")


def publish(exchange: LocalExchange, version: int = 1) -> WeightOffer:
    return exchange.publish(version, SPECS, units)


def test_what_is_published_arrives_and_both_sides_agree() -> None:
    exchange = LocalExchange(16)
    offer = publish(exchange)
    received = list(exchange.receive(offer))
    tensors = {name: tensor for bucket in received for name, tensor in bucket.named().items()}
    assert all(torch.equal(tensors[name], MODEL[name]) for name in MODEL)
    receipt = exchange.finish(offer)
    # 4 and 6 float32 and one int64: 16 + 24 + 8 bytes.
    assert (receipt.version, receipt.num_tensors, receipt.num_bytes) == (1, 3, 48)
    assert receipt.checksum == received[-1].checksum


def test_several_receivers_take_the_same_offer() -> None:
    exchange = LocalExchange(1 << 20)
    offer = publish(exchange)
    checksums = {list(exchange.receive(offer))[-1].checksum for _ in range(3)}
    assert checksums == {exchange.finish(offer).checksum}


def test_offers_do_not_mix() -> None:
    exchange = LocalExchange(1 << 20)
    first, second = publish(exchange, 1), exchange.publish(2, SPECS[:1], lambda: [{"a": MODEL["a"]}])
    list(exchange.receive(second))
    list(exchange.receive(first))
    assert exchange.finish(first).num_tensors == 3
    assert exchange.finish(second).num_tensors == 1


def test_a_finished_offer_cannot_be_received() -> None:
    exchange = LocalExchange(16)
    offer = publish(exchange)
    list(exchange.receive(offer))
    exchange.finish(offer)
    with pytest.raises(CheckError, match="weights-no-offer"):
        next(exchange.receive(offer))


def test_an_offer_that_nobody_took_is_no_success() -> None:
    exchange = LocalExchange(16)
    with pytest.raises(CheckError, match=r"weights-not-taken.*version 1"):
        exchange.finish(publish(exchange))


def test_a_receiver_that_gives_up_voids_the_offer() -> None:
    exchange = LocalExchange(16)
    offer = publish(exchange)
    stream = exchange.receive(offer)
    next(stream)
    stream.close()
    with pytest.raises(CheckError, match="weights-not-taken"):
        exchange.finish(offer)
    with pytest.raises(CheckError, match="weights-no-offer"):
        next(exchange.receive(offer))


def test_a_second_receiver_that_fails_takes_the_first_ones_success_away() -> None:
    exchange = LocalExchange(16)
    offer = publish(exchange)
    list(exchange.receive(offer))
    stream = exchange.receive(offer)
    next(stream)
    stream.close()
    with pytest.raises(CheckError, match="weights-not-taken"):
        exchange.finish(offer)


def test_a_sender_that_fails_reaches_the_receiver_and_the_next_push_works() -> None:
    exchange = LocalExchange(16)
    broken = exchange.publish(1, SPECS, failing_units)
    with pytest.raises(RuntimeError, match="the sender broke"):
        list(exchange.receive(broken))
    with pytest.raises(CheckError, match="weights-not-taken"):
        exchange.finish(broken)
    offer = publish(exchange, 1)
    list(exchange.receive(offer))
    assert exchange.finish(offer).num_tensors == 3


def test_units_that_differ_from_the_offer_are_refused_by_name() -> None:
    exchange = LocalExchange(16)
    offer = exchange.publish(1, SPECS[:2] + SPECS[:1], units)
    with pytest.raises(CheckError, match=r"c int64.*arrived where the offer has a float32"):
        list(exchange.receive(offer))


@pytest.mark.parametrize("end", ["finish", "withdraw", "receiver fails"])
def test_the_senders_tensors_are_let_go_after_use(end: str) -> None:
    exchange = LocalExchange(16)
    tensor = torch.zeros(4)
    alive = weakref.ref(tensor)
    offer = exchange.publish(1, [spec_of("a", tensor)], lambda held=tensor: [{"a": held}])  # type: ignore[misc]
    if end == "finish":
        list(exchange.receive(offer))
        exchange.finish(offer)
    elif end == "withdraw":
        exchange.withdraw(offer)
    else:
        stream = exchange.receive(offer)
        next(stream)
        stream.close()
        del stream
    del tensor
    gc.collect()
    assert alive() is None
