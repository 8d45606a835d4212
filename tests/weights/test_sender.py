"""What both transports between processes promise, with real processes at both ends."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onroute.core.errors import CheckError, MachineError
from onroute.core.weights import Transport, WeightOffer
from onroute.weights.broadcast import _Outgoing
from onroute.weights.bucket import Bucket
from onroute.weights.line import Lines
from onroute.weights.sender import Sender
from tests.weights.processes import (
    KIND,
    MODEL,
    PUBLISHED,
    SPECS,
    Process,
    engine,
    engines,
    opened,
    trainer,
    units,
)

PROMPT_S = 5.0
"""How soon one side must end after the other failed."""


@pytest.fixture(params=["broadcast", "shared_memory"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param


def push_whole(sender: Sender, takers: list[Process], version: int) -> None:
    """All of `takers` take the model bitwise."""
    offer = sender.publish(version, SPECS)
    for taker in takers:
        taker.tell(offer, "take")
    receipt = sender.send(offer, units())
    assert (receipt.version, receipt.num_tensors) == (version, len(MODEL))
    assert receipt.num_bytes == sum(tensor.nbytes for tensor in MODEL.values())
    assert all(taker.answer() == PUBLISHED for taker in takers)


def sending(sender: Sender, offer: WeightOffer) -> tuple[list[str], threading.Thread]:
    """Send in a thread; the list holds its error when it has ended."""
    failures: list[str] = []

    def send() -> None:
        try:
            sender.send(offer, units())
        except MachineError as error:
            failures.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    return failures, thread


@pytest.mark.parametrize("max_bytes", [1 << 10, 1 << 16, 1 << 30])
@pytest.mark.parametrize("count", [1, 2])
def test_every_tensor_arrives_bitwise_whatever_its_strides_dtype_and_size(transport, count, max_bytes):
    with engines(transport, count) as takers, opened(transport, count, max_bytes) as sender:
        push_whole(sender, takers, 1)
        push_whole(sender, takers, 2)


def test_an_offer_without_bytes_ends(transport):
    empty = {"e": torch.empty(0, 4)}
    with engines(transport, 1) as [taker], opened(transport, 1, 1024) as sender:
        for unit in (empty, {}):
            offer = sender.publish(1, SPECS[3:4] if unit else [])
            offer = replace(offer, tensors=tuple(replace(spec, name="e") for spec in offer.tensors))
            taker.tell(offer, "take")
            assert sender.send(offer, [unit]).num_bytes == 0
            assert len(taker.answer()) == len(unit)


def test_both_ends_finish_and_leave_by_themselves(transport):
    with engines(transport, 2) as takers:
        with opened(transport, 2, 4096) as sender:
            push_whole(sender, takers, 1)
        assert [taker.stop() for taker in takers] == [0, 0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_receiver_killed_in_a_push_ends_it_everywhere_and_a_new_one_takes_the_next(transport, count):
    with engines(transport, count) as takers, opened(transport, count, 1024) as sender:
        offer = sender.publish(1, SPECS)
        for taker, act in zip(takers, ["die", "take"], strict=False):
            taker.tell(offer, act)
        start = time.monotonic()
        with pytest.raises(MachineError, match=r"weights-transfer.*receiver 0 died or hung up.*version 1"):
            sender.send(offer, units())
        for survivor in takers[1:]:
            with pytest.raises(MachineError, match="receiver 0 died"):
                survivor.answer()
        assert time.monotonic() - start < PROMPT_S
        takers[0].kill()
        takers[0] = Process(engine, transport, 0, 30.0)
        push_whole(sender, takers, 2)
        takers[0].kill()


def test_a_sender_killed_in_a_push_ends_its_receivers_which_take_the_next_from_another(transport):
    dying = Process(trainer, transport, 2)
    with engines(transport, 2) as takers:
        dying.tell("publish")
        offer = dying.answer()
        for taker in takers:
            taker.tell(offer, "take")
        start = time.monotonic()
        for taker in takers:
            with pytest.raises(MachineError, match=r"weights-transfer.*the sender died or hung up"):
                taker.answer()
        # The receivers arrive and build their group in this time too.
        assert time.monotonic() - start < 2 * PROMPT_S
        dying.kill()
        with opened(transport, 2, 1024) as sender:
            push_whole(sender, takers, 2)


def test_a_receiver_that_raises_at_the_third_bucket_ends_the_push_and_takes_the_next(transport):
    with engines(transport, 2) as takers, opened(transport, 2, 1024) as sender:
        offer = sender.publish(1, SPECS)
        takers[0].tell(offer, "take")
        takers[1].tell(offer, "raise")
        with pytest.raises(MachineError, match=r"it gave up.*told by receiver 1"):
            sender.send(offer, units())
        assert takers[1].answer() == "third"
        with pytest.raises(RuntimeError, match="the engine broke"):
            takers[1].answer()
        with pytest.raises(MachineError, match="told by the sender"):
            takers[0].answer()
        push_whole(sender, takers, 2)


def test_an_aborted_push_ends_on_both_sides(transport):
    with engines(transport, 1) as [taker], opened(transport, 1, 1024) as sender:
        offer = sender.publish(1, SPECS)
        taker.tell(offer, "stall")
        failures, thread = sending(sender, offer)
        assert taker.answer() == "third"
        start = time.monotonic()
        sender.abort(offer)
        thread.join()
        with pytest.raises(MachineError, match="aborted"):
            taker.answer()
        assert "aborted" in failures[0]
        assert time.monotonic() - start < PROMPT_S
        push_whole(sender, [taker], 2)


def test_an_offer_aborted_before_it_was_sent_turns_receivers_away(transport):
    with engines(transport, 1) as [taker], opened(transport, 1, 1024) as sender:
        offer = sender.publish(1, SPECS)
        taker.tell(offer, "take")
        sender.abort(offer)
        with pytest.raises(MachineError, match="weights-transfer"):
            taker.answer()
        with pytest.raises(CheckError, match="weights-no-offer"):
            sender.send(offer, units())


def test_a_sender_whose_units_break_says_so_to_its_receivers(transport):
    def breaking() -> Iterator[dict[str, torch.Tensor]]:
        yield from list(units())[:3]
        raise ValueError("no more weights")

    with engines(transport, 1) as [taker], opened(transport, 1, 1024) as sender:
        offer = sender.publish(1, SPECS)
        taker.tell(offer, "take")
        with pytest.raises(ValueError, match="no more weights"):
            sender.send(offer, breaking())
        with pytest.raises(MachineError, match=r"ValueError: no more weights.*told by the sender"):
            taker.answer()
        push_whole(sender, [taker], 2)


@pytest.mark.parametrize(
    ("order", "code"),
    [
        (lambda names: names[::-1], "weights-unexpected"),
        (lambda names: names[:-1], "weights-missing"),
        (lambda names: [*names, "large2"], "weights-extra"),
        (lambda names: [*names[:2], *names[3:]], "weights-unexpected"),
    ],
    ids=["reordered", "tail missing", "one too many", "gap"],
)
def test_a_stream_that_is_not_the_offer_is_refused_by_the_receiver_and_the_sender_learns_why(
    transport, order, code
):
    tensors = {**MODEL, "large2": MODEL["large"]}
    with engines(transport, 1) as [taker], opened(transport, 1, 1 << 16) as sender:
        offer = sender.publish(1, SPECS)
        taker.tell(offer, "take")
        with pytest.raises(CheckError, match=f"{code}.*told by receiver 0"):
            sender.send(offer, ({name: tensors[name]} for name in order(list(MODEL))))
        with pytest.raises(CheckError, match=code):
            taker.answer()
        push_whole(sender, [taker], 2)


class Corrupting(_Outgoing):
    """Announces another checksum than that of the bytes."""

    def carry(self, bucket: Bucket, lines: Lines) -> None:
        super().carry(replace(bucket, checksum=bucket.checksum ^ 1), lines)


def test_bytes_that_do_not_fit_their_checksum_are_refused_on_both_sides():
    courier = Corrupting("127.0.0.1", torch.device("cpu"), 30.0)
    sender = Sender(courier, receivers=1, max_bytes=1 << 16, deadline_s=30.0)
    with engines("broadcast", 1) as [taker], closing(sender):
        offer = sender.publish(1, SPECS)
        taker.tell(offer, "take")
        with pytest.raises(CheckError, match=r"weights-checksum.*told by receiver 0"):
            sender.send(offer, units())
        with pytest.raises(CheckError, match="weights-checksum"):
            taker.answer()


def test_a_receiver_that_never_comes_is_named_at_the_deadline(transport):
    with engines(transport, 1) as [taker], opened(transport, 2, 1024, deadline_s=1.0) as sender:
        offer = sender.publish(1, SPECS)
        taker.tell(offer, "take")
        late = r"the sender waited \d s for 2 receiver\(s\) to arrive"
        with pytest.raises(MachineError, match=late):
            sender.send(offer, units())
        with pytest.raises(MachineError, match=late):
            taker.answer()


def test_a_sender_that_never_sends_is_named_at_the_deadline(transport):
    with engines(transport, 1, deadline_s=0.5) as [taker], opened(transport, 1, 1024) as sender:
        taker.tell(sender.publish(1, SPECS), "take")
        with pytest.raises(MachineError, match=r"receiver 0 waited \d s for its welcome from the sender"):
            taker.answer()


def test_a_receiver_that_freezes_is_named_at_the_deadline_and_replaced(transport):
    with engines(transport, 1) as takers, opened(transport, 1, 1024, deadline_s=1.5) as sender:
        push_whole(sender, takers, 1)
        offer = sender.publish(2, SPECS)
        takers[0].tell(offer, "stall")
        failures, thread = sending(sender, offer)
        assert takers[0].answer() == "third"
        takers[0].freeze()
        thread.join()
        assert re.search(
            r"the sender waited \d s for word that a bucket was taken from receiver 0", failures[0]
        )
        with engines(transport, 1) as others:
            push_whole(sender, others, 3)


def test_an_offer_is_sent_once_and_only_where_it_was_published(transport):
    with engines(transport, 1) as [taker], opened(transport, 1, 1 << 16) as sender:
        offer = sender.publish(1, SPECS)
        taker.tell(offer, "take")
        sender.send(offer, units())
        taker.answer()
        with pytest.raises(CheckError, match="weights-no-offer"):
            sender.send(offer, units())
        taker.tell(offer, "take")
        with pytest.raises(MachineError, match="no sender is at the rendezvous"):
            taker.answer()


def test_closing_ends_a_push_that_runs_in_another_thread(transport):
    sender = KIND[transport].open_sender(receivers=1, max_bytes=1024, deadline_s=30.0)
    offer = sender.publish(1, SPECS)
    failures, thread = sending(sender, offer)
    time.sleep(0.1)
    start = time.monotonic()
    sender.close()
    thread.join()
    assert "aborted" in failures[0]
    assert time.monotonic() - start < PROMPT_S


def test_a_push_leaves_no_open_file_thread_or_shared_memory(transport):
    with engines(transport, 2) as takers, opened(transport, 2, 1024) as sender:
        push_whole(sender, takers, 1)
        before = footprint()
        push_whole(sender, takers, 2)
        offer = sender.publish(3, SPECS)
        sender.abort(offer)
        after = footprint()
        # Fewer is fine: what earlier tests left to the garbage collector may go in between.
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def footprint() -> tuple[int, int, int]:
    gc.collect()
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        len(list(Path("/dev/shm").iterdir())),
    )
