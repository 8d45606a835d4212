"""The process group of a broadcast: kept while it works, built anew when not, apart from the trainer's."""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from onroute.core.errors import CheckError, MachineError
from onroute.weights import broadcast
from onroute.weights.line import Lines
from onroute.weights.messages import Header
from onroute.weights.receiver import Receiver
from onroute.weights.rendezvous import Rendezvous
from onroute.weights.sender import Sender
from tests.weights.processes import PUBLISHED, SPECS, Process, engines, opened, told, units

CPU = torch.device("cpu")


def group_after_push(sender: Sender, takers: list[Process]) -> str:
    offer = sender.publish(1, SPECS, receivers=len(takers))
    for taker in takers:
        taker.tell(offer, "take")
    sender.send(offer, units())
    assert all(taker.answer() == PUBLISHED for taker in takers)
    courier = sender._courier
    assert isinstance(courier, broadcast._Outgoing)
    return courier._group.name


def test_the_group_is_kept_while_the_receivers_are_the_same() -> None:
    with engines("broadcast", 2) as takers, opened("broadcast", 2, 1 << 16) as sender:
        first = group_after_push(sender, takers)
        assert group_after_push(sender, takers) == first


def test_the_group_is_built_anew_when_a_receiver_leaves_or_comes_or_is_another() -> None:
    with engines("broadcast", 2) as takers, opened("broadcast", 2, 1 << 16) as sender:
        names = [group_after_push(sender, takers)]
        names.append(group_after_push(sender, takers[:1]))
        names.append(group_after_push(sender, takers))
        with engines("broadcast", 1) as others:
            names.append(group_after_push(sender, [*others, takers[1]]))
        assert len(set(names)) == 4


def test_a_trainer_keeps_its_own_default_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with engines("broadcast", 1) as takers, opened("broadcast", 1, 1 << 16) as sender:
            group_after_push(sender, takers)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 1.0
            assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_nothing_listens_on_another_interface() -> None:
    with engines("broadcast", 1) as takers, opened("broadcast", 1, 1 << 16) as sender:
        group_after_push(sender, takers)
        courier = sender._courier
        assert isinstance(courier, broadcast._Outgoing)
        offer = sender.publish(1, SPECS)
        ports = [Rendezvous.parse(offer.rendezvous).port, courier._store.port]
        for port in ports:
            socket.create_connection(("127.0.0.1", port)).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port))


def test_strangers_at_the_door_are_turned_away_and_the_push_goes_on() -> None:
    with engines("broadcast", 1) as [taker], opened("broadcast", 1, 1 << 16) as sender:
        offer = sender.publish(1, SPECS)
        place = Rendezvous.parse(offer.rendezvous)
        strangers = [socket.create_connection((place.host, place.port)) for _ in range(3)]
        strangers[0].sendall(b"\0\0\0\2[]")
        strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[2].close()
        taker.tell(offer, "take")
        sender.send(offer, units())
        assert taker.answer() == PUBLISHED
        for stranger in strangers[:2]:
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
            stranger.close()


def test_a_second_receiver_of_the_same_index_is_refused_by_name() -> None:
    with (
        engines("broadcast", 1) as [taker],
        engines("broadcast", 1) as [twin],
        opened("broadcast", 2, 1 << 16, deadline_s=3.0) as sender,
    ):
        offer = sender.publish(1, SPECS)
        taker.tell(offer, "take")
        twin.tell(offer, "take")
        with pytest.raises(MachineError, match="2 receiver"):
            sender.send(offer, units())
        failures = []
        for one in (taker, twin):
            with pytest.raises((CheckError, MachineError)) as caught:
                one.answer()
            failures.append(caught.value.code)
        assert sorted(failures) == ["weights-receiver", "weights-transfer"]


class Hanging(broadcast._Incoming):
    """A receiver that hears of a bucket and never enters the collective."""

    def fetch(self, header: Header, lines: Lines) -> tuple[torch.Tensor, ...]:
        time.sleep(30.0)
        return super().fetch(header, lines)


def hanging_engine(pipe: Connection) -> None:
    receiver = Receiver(Hanging(0, CPU, 30.0), index=0, deadline_s=30.0)
    for (offer,) in told(pipe):
        list(receiver.receive(offer))


def test_a_receiver_that_hangs_in_a_bucket_holds_nobody_beyond_the_deadline() -> None:
    hanging = Process(hanging_engine)
    sender = broadcast.open_sender(receivers=1, max_bytes=1 << 16, deadline_s=2.0)
    big = {"big": torch.zeros(8 << 20)}
    with closing(sender):
        offer = sender.publish(1, SPECS)
        hanging.tell(offer)
        start = time.monotonic()
        with pytest.raises(MachineError, match=r"the sender waited 2 s for a bucket to reach all receivers"):
            sender.send(offer, [big])
        assert time.monotonic() - start < 6.0
        with engines("broadcast", 1) as takers:
            group_after_push(sender, takers)
    hanging.kill()
