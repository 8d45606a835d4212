"""The lines between a sender and its receivers: messages, and the notice that a side failed or died.

A line is a socket that lives as long as its push. The kernel closes it when either process ends, however
it ends, so that death is noticed at once on any host, without heartbeats that a busy process could miss.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from onroute.core.errors import CheckError, MachineError
from onroute.weights.messages import Done, Failure, Message, decode, encode

LENGTH = struct.Struct("!I")
CHUNK_BYTES = 1 << 18
MAX_FILES = 8
LAST_WORDS_S = 1.0
"""How long a peer that no longer reads may delay this side's own end."""
POLL_S = 0.1
"""How long a wait may go without a look at whether it was told to stop."""

Expected = TypeVar("Expected", bound=Message)
End = TypeVar("End", "Line", socket.socket)


def readable(ends: Iterable[End], timeout_s: float) -> list[End]:
    """The ends from which something can be read, among it that the peer hung up, within `timeout_s`."""
    by_file = {end.fileno(): end for end in ends}
    poll = select.poll()
    for file in by_file:
        poll.register(file, select.POLLIN)
    return [by_file[file] for file, _ in poll.poll(1000 * timeout_s)]


class Line:
    """One socket, cut into messages. Open files may travel with a message when it is a Unix socket."""

    def __init__(self, connection: socket.socket, peer: str, *, deadline_s: float) -> None:
        connection.settimeout(deadline_s)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._bytes = bytearray()
        self.peer = peer
        self.inbox: deque[Message] = deque()
        self.files: deque[int] = deque()
        self.is_over = False
        self.is_done = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Raises OSError when the peer is gone or does not listen."""
        words = encode(message)
        words = LENGTH.pack(len(words)) + words
        sent = socket.send_fds(self._connection, [words], files) if files else 0
        self._connection.sendall(words[sent:])

    def read(self) -> None:
        """Move what has arrived into the inbox. Call it when the line is readable; it does not wait then."""
        try:
            if self._connection.family == socket.AF_UNIX:
                arrived, files, _, _ = socket.recv_fds(
                    self._connection, CHUNK_BYTES, MAX_FILES, socket.MSG_CMSG_CLOEXEC
                )
                self.files.extend(files)
            else:
                arrived = self._connection.recv(CHUNK_BYTES)
        except OSError:
            arrived = b""
        self.is_over = not arrived
        self._bytes += arrived
        while (words := self._next_words()) is not None:
            message = decode(words, peer=self.peer)
            self.is_done |= isinstance(message, Done)
            self.inbox.append(message)

    def _next_words(self) -> bytes | None:
        if len(self._bytes) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
        if len(self._bytes) < end:
            return None
        words = bytes(self._bytes[LENGTH.size : end])
        del self._bytes[:end]
        return words

    def send_last(self, message: Message) -> None:
        """Tell the peer, if it still listens, and close."""
        with suppress(OSError):
            self._connection.settimeout(LAST_WORDS_S)
            self.send(message)
        self.close()

    def close(self) -> None:
        self._connection.close()
        while self.files:
            os.close(self.files.popleft())


class Lines:
    """All lines of one side. Whatever it waits for, it notices when any peer fails or dies.

    waiter, push: who waits and in which push, for the messages of errors.
    stop: when it is set, every wait ends.
    """

    def __init__(self, *, waiter: str, push: str, deadline_s: float, stop: threading.Event) -> None:
        self.all: list[Line] = []
        self._waiter, self._push = waiter, push
        self._deadline_s, self._stop = deadline_s, stop

    def tell(self, line: Line, message: Message, files: Sequence[int] = ()) -> None:
        """Raises MachineError when the peer is gone; its own words about why, if it left some."""
        try:
            line.send(message, files)
        except OSError as error:
            while not line.is_over and readable([line], 0.0):
                self.look()
            raise self._lost(line, f"it could be told of {type(message).__name__} ({error})") from error

    def tell_all(self, message: Message) -> None:
        for line in self.all:
            self.tell(line, message)

    def close(self, error: BaseException | None = None) -> None:
        """Hang up; when this side gives up because of `error`, tell whoever still listens."""
        for line in self.all:
            if error is not None:
                line.send_last(Failure.of(error))
            line.close()
        self.all.clear()

    def hear(self, line: Line, what: str, *expected: type[Expected]) -> Expected:
        """The next message of `line`, which is waited for and must be of one of the `expected` kinds."""
        self.watch(f"{what} from {line.peer}", lambda: bool(line.inbox))
        message = line.inbox.popleft()
        if not isinstance(message, expected):
            raise CheckError(
                "weights-message",
                f"{type(message).__name__} arrived while the {self._waiter} waited for {what}",
                f"from {line.peer} in {self._push}",
                "run the same version of onroute on both sides",
            )
        return message

    def watch(self, what: str, ready: Callable[[], bool], *, poll_s: float = POLL_S) -> None:
        """Wait until `ready()`; a peer's message is no reason to wake unless it makes it ready.

        Raises:
            MachineError: the deadline passed, this side was told to stop, or a peer died.
            OnrouteError: a peer said that it failed; its error.
        """
        start = time.monotonic()
        while True:
            waited_s = time.monotonic() - start
            if self._stop.is_set():
                raise MachineError(
                    "weights-transfer",
                    f"aborted while the {self._waiter} waited for {what}, after {waited_s:.1f} s",
                    self._push,
                    "push again",
                )
            if ready():
                return
            if waited_s > self._deadline_s:
                raise MachineError(
                    "weights-transfer",
                    f"the {self._waiter} waited {waited_s:.0f} s for {what}",
                    self._push,
                    "see what the other side is busy with; raise the deadline only if it was working",
                )
            self.look(poll_s, what)

    def look(self, timeout_s: float = 0.0, what: str = "the next word") -> None:
        """Read what arrives within `timeout_s`; raises when a peer failed or died."""
        for line in readable([line for line in self.all if not line.is_over], timeout_s):
            line.read()
        for line in self.all:
            for message in line.inbox:
                if isinstance(message, Failure):
                    raise message.error(peer=line.peer)
        for line in self.all:
            if line.is_over and not line.is_done:
                raise self._lost(line, f"the {self._waiter} got {what}")

    def _lost(self, line: Line, before: str) -> MachineError:
        return MachineError(
            "weights-transfer",
            f"{line.peer} died or hung up before {before}",
            self._push,
            "look for its last words, restart it, then push again",
        )
