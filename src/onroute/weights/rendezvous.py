"""Where the two ends of a push between processes meet: its address, and how it is listened to and reached."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from onroute.core.errors import CheckError, MachineError
from onroute.core.weights import Transport

BACKLOG = 8
"""Room for strangers at the door, so that they keep no receiver out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address of one push; after it nobody listens there again.

    "tcp://10.0.0.4:41313/9f0c?receivers=2" is found from any host that reaches the sender's,
    "unix:///9f0c?receivers=2" from the sender's host only.

    push: a secret name; who does not know it is not let in.
    receivers: how many must take the push.
    """

    scheme: Literal["tcp", "unix"]
    host: str = ""
    port: int = 0
    push: str
    receivers: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        place = f"{host}:{self.port}" if self.scheme == "tcp" else ""
        return f"{self.scheme}://{place}/{self.push}?receivers={self.receivers}"

    @classmethod
    def parse(cls, text: str) -> Rendezvous:
        """Raises CheckError when `text` is no address of a push."""
        try:
            parts = urlsplit(text)
            receivers = int(parse_qs(parts.query)["receivers"][0])
            if parts.scheme == "unix":
                return cls(scheme="unix", push=parts.path[1:], receivers=receivers)
            if parts.scheme == "tcp" and parts.hostname is not None and parts.port is not None:
                return cls(
                    scheme="tcp",
                    host=parts.hostname,
                    port=parts.port,
                    push=parts.path[1:],
                    receivers=receivers,
                )
        except (ValueError, KeyError):
            pass
        raise CheckError(
            "weights-rendezvous",
            f"{text!r} is no address of a push between processes",
            "expected tcp://HOST:PORT/PUSH?receivers=N or unix:///PUSH?receivers=N",
            "hand the offer's rendezvous to the receiver as it is",
        )


def listen_tcp(host: str, push: str, receivers: int) -> tuple[socket.socket, Rendezvous]:
    """Listen on a free port of `host`, and on no other interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=BACKLOG + receivers)
    port = listener.getsockname()[1]
    return listener, Rendezvous(scheme="tcp", host=host, port=port, push=push, receivers=receivers)


def listen_unix(push: str, receivers: int) -> tuple[socket.socket, Rendezvous]:
    """Listen under an abstract name: it is no file, so it is gone when the process is."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_abstract_name(push))
    listener.listen(BACKLOG + receivers)
    return listener, Rendezvous(scheme="unix", push=push, receivers=receivers)


def connect(rendezvous: Rendezvous, *, deadline_s: float) -> socket.socket:
    """Raises MachineError when nobody listens at `rendezvous`."""
    try:
        if rendezvous.scheme == "tcp":
            return socket.create_connection((rendezvous.host, rendezvous.port), timeout=deadline_s)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(_abstract_name(rendezvous.push))
        except OSError:
            connection.close()
            raise
        return connection
    except OSError as error:
        raise MachineError(
            "weights-transfer",
            f"no sender is at the rendezvous: {error}",
            f"rendezvous {rendezvous}",
            "the push is over, was aborted, or its sender died: publish again",
        ) from error


def _abstract_name(push: str) -> str:
    return f"\0onroute-{push}"


def choose(sender_host: str, receiver_hosts: Sequence[str]) -> Transport:
    """The transport that fits: shared memory when all receivers run on the sender's host, else broadcast."""
    return "shared_memory" if all(host == sender_host for host in receiver_hosts) else "broadcast"
