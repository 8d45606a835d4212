"""Messages arrive whole and in order however the bytes are cut, and an end is noticed for what it is."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from onroute.core.errors import CheckError, MachineError, OnrouteError, UserError
from onroute.core.weights import TensorSpec
from onroute.weights.line import LENGTH, Line, Lines
from onroute.weights.messages import (
    Done,
    End,
    Failure,
    Header,
    Hello,
    Message,
    Taken,
    Welcome,
    decode,
    encode,
)

HEADER = Header(
    specs=(TensorSpec(name="wé", dtype="bfloat16", shape=(2, 3)),), checksum=7, slot=1, new_block_bytes=9
)
MESSAGES: list[Message] = [
    Hello(push="p", receiver=1, group=""),
    Welcome(group="g", store_port=4),
    HEADER,
    Taken(),
    End(),
    Done(),
]


@pytest.fixture
def ends() -> Iterator[tuple[Lines, socket.socket]]:
    ours, theirs = socket.socketpair()
    lines = Lines(waiter="sender", push="push p", deadline_s=0.3, stop=threading.Event())
    lines.all.append(Line(ours, "receiver 0", deadline_s=1.0))
    yield lines, theirs
    lines.close()
    theirs.close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_bytes_and_back(message: Message) -> None:
    assert decode(encode(message), peer="x") == message


@pytest.mark.parametrize(
    "words", [b"", b"[]", b"{}", b'["Taken", {"x": 1}]', b'["Spam", {}]', b"\xff", b'["Taken", 3]']
)
def test_bytes_that_are_no_message_are_refused(words: bytes) -> None:
    with pytest.raises(CheckError, match=r"weights-message.*from receiver 0"):
        decode(words, peer="receiver 0")


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_messages_arrive_whole_however_they_are_cut(ends: tuple[Lines, socket.socket], cut: int) -> None:
    lines, theirs = ends
    line = lines.all[0]
    words = b"".join(LENGTH.pack(len(one)) + one for one in map(encode, MESSAGES))
    for start in range(0, len(words), cut):
        theirs.sendall(words[start : start + cut])
        line.read()
    assert list(line.inbox) == MESSAGES


def test_files_arrive_with_their_messages_in_order(ends: tuple[Lines, socket.socket]) -> None:
    lines, theirs = ends
    there = Line(theirs, "the sender", deadline_s=1.0)
    for content in (b"first", b"second"):
        file = os.memfd_create("test")
        os.write(file, content)
        lines.tell(lines.all[0], HEADER, files=[file])
        os.close(file)
    while len(there.inbox) < 2:
        there.read()
    assert [os.pread(file, 9, 0) for file in there.files] == [b"first", b"second"]
    there.close()


def test_an_error_keeps_its_class_and_names_who_told(ends: tuple[Lines, socket.socket]) -> None:
    errors: list[OnrouteError] = [
        kind("a-b", "what", "where", "fix") for kind in (CheckError, MachineError, UserError)
    ]
    for error in errors:
        answer = Failure.of(error).error(peer="receiver 1")
        assert type(answer) is type(error)
        assert str(answer) == "[a-b] what; where (told by receiver 1); fix"


def test_last_words_are_heard_before_the_silence(ends: tuple[Lines, socket.socket]) -> None:
    lines, theirs = ends
    Line(theirs, "the sender", deadline_s=1.0).send_last(
        Failure.of(RuntimeError("out of memory\nsecond line"))
    )
    with pytest.raises(MachineError, match=r"RuntimeError: out of memory; .*told by receiver 0"):
        for _ in range(100):
            lines.tell(lines.all[0], Taken())


def test_silence_is_a_death_unless_the_peer_was_done(ends: tuple[Lines, socket.socket]) -> None:
    lines, theirs = ends
    there = Line(theirs, "the sender", deadline_s=1.0)
    there.send(Done())
    there.close()
    lines.look(0.1)
    lines.look(0.1)
    assert lines.hear(lines.all[0], "the end", Done) == Done()
    lines.all[0].is_done = False
    with pytest.raises(MachineError, match="receiver 0 died or hung up before the sender got its hello"):
        lines.look(0.1, "its hello")


def test_a_wait_ends_at_its_deadline_or_when_it_is_told_to(ends: tuple[Lines, socket.socket]) -> None:
    lines, _ = ends
    start = time.monotonic()
    with pytest.raises(MachineError, match=r"the sender waited 0 s for its hello from receiver 0; push p"):
        lines.hear(lines.all[0], "its hello", Hello)
    assert 0.3 <= time.monotonic() - start < 2.0
    lines._stop.set()
    with pytest.raises(MachineError, match="aborted while the sender waited for its hello"):
        lines.hear(lines.all[0], "its hello", Hello)


def test_a_message_out_of_turn_is_refused(ends: tuple[Lines, socket.socket]) -> None:
    lines, theirs = ends
    Line(theirs, "the sender", deadline_s=1.0).send(End())
    with pytest.raises(
        CheckError, match=r"weights-message.*End arrived while the sender waited for its hello"
    ):
        lines.hear(lines.all[0], "its hello", Hello)
