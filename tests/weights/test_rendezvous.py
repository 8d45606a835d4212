"""An address says all that a receiver needs, and survives being text."""

from __future__ import annotations

import pytest

from onroute.core.errors import CheckError
from onroute.weights.rendezvous import Rendezvous, choose


@pytest.mark.parametrize(
    ("rendezvous", "text"),
    [
        (
            Rendezvous(scheme="tcp", host="10.0.0.4", port=413, push="9f", receivers=2),
            "tcp://10.0.0.4:413/9f?receivers=2",
        ),
        (
            Rendezvous(scheme="tcp", host="::1", port=7, push="9f", receivers=1),
            "tcp://[::1]:7/9f?receivers=1",
        ),
        (Rendezvous(scheme="unix", push="9f", receivers=3), "unix:///9f?receivers=3"),
    ],
)
def test_an_address_is_text_and_back(rendezvous: Rendezvous, text: str) -> None:
    assert str(rendezvous) == text
    assert Rendezvous.parse(text) == rendezvous


@pytest.mark.parametrize(
    "text",
    [
        "push-0",
        "",
        "tcp://host/9f?receivers=1",
        "tcp://h:99999/9f?receivers=1",
        "unix:///9f",
        "unix:///9f?receivers=x",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(CheckError, match="weights-rendezvous"):
        Rendezvous.parse(text)


def test_shared_memory_is_chosen_only_where_all_receivers_share_the_senders_host() -> None:
    assert choose("a", ["a", "a"]) == "shared_memory"
    assert choose("a", ["a", "b"]) == "broadcast"
    assert choose("a", ["b", "b"]) == "broadcast"
