"""Shared blocks: few, large enough, and gone with their users."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onroute.core.errors import CheckError, MachineError
from onroute.weights import shared_memory
from onroute.weights.checksum import spec_of
from tests.weights.processes import SPECS, engines, opened, units


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:onroute-weights")


def test_two_blocks_carry_any_number_of_buckets_and_none_is_left() -> None:
    mapped: list[int] = []

    def observed() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(20):
            mapped.append(num_mapped())
            yield {f"w{number}": torch.full((200,), float(number))}

    specs = [spec_of(f"w{number}", torch.empty(200)) for number in range(20)]
    with engines("shared_memory", 2) as takers, opened("shared_memory", 2, 1024) as sender:
        offer = sender.publish(1, specs)
        for taker in takers:
            taker.tell(offer, "take")
        assert sender.send(offer, observed()).num_tensors == 20
        for taker in takers:
            contents = [one.content for one in taker.answer()]
            assert contents == [torch.full((200,), float(n)).numpy().tobytes() for n in range(20)]
    assert max(mapped) == 2
    assert num_mapped() == 0


def test_a_unit_above_the_limit_gets_a_block_of_its_size_which_smaller_ones_use_after_it() -> None:
    sizes = [10, 10, 100_000, 5, 100_000, 300_000, 7]
    tensors = {f"w{index}": torch.arange(float(size)) for index, size in enumerate(sizes)}
    with engines("shared_memory", 1) as [taker], opened("shared_memory", 1, 64) as sender:
        offer = sender.publish(1, [spec_of(name, tensor) for name, tensor in tensors.items()])
        taker.tell(offer, "take")
        sender.send(offer, ({name: tensor} for name, tensor in tensors.items()))
        assert [one.content for one in taker.answer()] == [t.numpy().tobytes() for t in tensors.values()]


def test_a_killed_receiver_leaves_no_block_and_no_name() -> None:
    names = set(Path("/dev/shm").iterdir())
    with engines("shared_memory", 1) as [taker], opened("shared_memory", 1, 1024) as sender:
        offer = sender.publish(1, SPECS)
        taker.tell(offer, "die")
        with pytest.raises(MachineError, match="receiver 0 died"):
            sender.send(offer, units())
        assert num_mapped() == 0
    assert set(Path("/dev/shm").iterdir()) <= names


def test_an_offer_of_another_transport_is_refused() -> None:
    with opened("broadcast", 1, 1024) as sender:
        offer = sender.publish(1, SPECS)
        receiver = shared_memory.open_receiver(0)
        with pytest.raises(CheckError, match="an offer by broadcast came to a receiver by shared_memory"):
            next(receiver.receive(offer))
        receiver.close()
