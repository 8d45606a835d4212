"""What sender and receivers tell each other during a push, besides the tensors, and its form in bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeAlias

from onroute.core.errors import CheckError, MachineError, OnrouteError, UserError
from onroute.core.weights import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A receiver arrives. group: the process group it still holds from an earlier push, or ""."""

    push: str
    receiver: int
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """All receivers have arrived. group, store_port: the process group of this push, or "" and 0."""

    group: str
    store_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A bucket is on its way.

    checksum: as in `Bucket`. slot: which block of shared memory holds it. new_block_bytes: size of
    the block that comes with this header and replaces the one in the slot; 0 when it stays.
    """

    specs: tuple[TensorSpec, ...]
    checksum: int
    slot: int = 0
    new_block_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The receiver is done with the oldest bucket that it has not answered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """No bucket follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The receiver took the push whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One side gives up, and why. kind: name of the error's class."""

    kind: str
    code: str
    what: str
    where: str
    fix: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        for kind, error_class in _ERRORS.items():
            if isinstance(error, error_class):
                return cls(kind=kind, code=error.code, what=error.what, where=error.where, fix=error.fix)
        gave_up = isinstance(error, GeneratorExit)
        reason = "it gave up" if gave_up else f"{type(error).__name__}: {error}".splitlines()[0]
        return cls(
            kind="MachineError",
            code="weights-transfer",
            what=f"the push failed on the other side: {reason}",
            where="between two buckets" if gave_up else "outside of the transport",
            fix="look at that side's own error, then push again",
        )

    def error(self, *, peer: str) -> OnrouteError:
        """The same failure on this side of the push."""
        error_class = _ERRORS.get(self.kind, MachineError)
        return error_class(self.code, self.what, f"{self.where} (told by {peer})", self.fix)


_ERRORS: dict[str, type[OnrouteError]] = {
    error_class.__name__: error_class for error_class in (CheckError, MachineError, UserError)
}

Message: TypeAlias = Hello | Welcome | Header | Taken | End | Done | Failure

_MESSAGES: dict[str, type[Message]] = {
    message_class.__name__: message_class
    for message_class in (Hello, Welcome, Header, Taken, End, Done, Failure)
}


def encode(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)]).encode()


def decode(words: bytes, *, peer: str) -> Message:
    """Raises CheckError when `words` are none of the messages, as from another version of onroute."""
    try:
        name, fields = json.loads(words)
        if "specs" in fields:
            fields["specs"] = tuple(
                TensorSpec(name=spec["name"], dtype=spec["dtype"], shape=tuple(spec["shape"]))
                for spec in fields["specs"]
            )
        return _MESSAGES[name](**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckError(
            "weights-message",
            f"{len(words)} bytes arrived that are no message of a push ({type(error).__name__})",
            f"from {peer}",
            "run the same version of onroute on both sides",
        ) from error
