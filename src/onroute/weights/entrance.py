"""Lets the receivers of a push in, and nobody else."""

from __future__ import annotations

import socket

from onroute.core.errors import CheckError, OnrouteError
from onroute.weights.line import Line, Lines, readable
from onroute.weights.messages import Failure, Hello
from onroute.weights.rendezvous import Rendezvous

POLL_S = 0.01


class Entrance:
    """The door of one push. A receiver is whoever knows the push's name and has a free index."""

    def __init__(self, listener: socket.socket, rendezvous: Rendezvous, *, deadline_s: float) -> None:
        self._listener = listener
        self._rendezvous = rendezvous
        self._deadline_s = deadline_s
        self._strangers: list[Line] = []
        self._hellos: dict[int, Hello] = {}
        self._lines: dict[int, Line] = {}

    def gather(self, lines: Lines) -> list[Hello]:
        """Wait until all receivers have arrived; afterwards `lines` and the answer are ordered by index."""
        expected = self._rendezvous.receivers
        try:
            lines.watch(f"{expected} receiver(s) to arrive", lambda: self._admit(lines), poll_s=POLL_S)
        finally:
            for stranger in self._strangers:
                stranger.close()
        lines.all[:] = [self._lines[index] for index in range(expected)]
        return [self._hellos[index] for index in range(expected)]

    def _admit(self, lines: Lines) -> bool:
        """Let in who is at the door; whether all are in."""
        if readable([self._listener], 0.0):
            connection, _ = self._listener.accept()
            self._strangers.append(Line(connection, "a stranger", deadline_s=self._deadline_s))
        for stranger in readable(self._strangers, 0.0):
            hello = _hello(stranger)
            if hello is None and not stranger.is_over:
                continue
            self._strangers.remove(stranger)
            if hello is None or hello.push != self._rendezvous.push:
                stranger.close()
            elif hello.receiver in self._lines or not 0 <= hello.receiver < self._rendezvous.receivers:
                self._refuse(stranger, hello)
            else:
                stranger.peer = f"receiver {hello.receiver}"
                self._hellos[hello.receiver] = hello
                self._lines[hello.receiver] = stranger
                lines.all.append(stranger)
        return len(self._lines) == self._rendezvous.receivers

    def _refuse(self, stranger: Line, hello: Hello) -> None:
        error = CheckError(
            "weights-receiver",
            f"receiver {hello.receiver} is not expected or has arrived already",
            f"the push has {self._rendezvous.receivers} receiver(s), counted from 0",
            "give every receiver its own index",
        )
        stranger.send_last(Failure.of(error))


def _hello(stranger: Line) -> Hello | None:
    """Its first message, if it has arrived; None when it is none of ours."""
    try:
        stranger.read()
    except OnrouteError:
        stranger.is_over = True
        return None
    message = stranger.inbox.popleft() if stranger.inbox else None
    if message is not None and not isinstance(message, Hello):
        stranger.is_over = True
        return None
    return message
