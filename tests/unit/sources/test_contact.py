"""When the API server counts as unavailable, and the log of its outages."""

import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from pykubeproxy.sources import Client
from pykubeproxy.sources.attempt import Attempt
from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.failures import Failure, Unreachable
from tests.fakes.canned import CannedServer, whole

SILENT = "the API server sends nothing"


class Clock:
    """A clock, and the time of the last acknowledgement on an open watch."""

    def __init__(self) -> None:
        self.now, self.acknowledged = 0.0, -math.inf

    def unacknowledged(self) -> float:
        return self.now - self.acknowledged


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def contact(clock: Clock) -> Contact:
    """A contact that has heard the server at the start, and waits for the answer to the next request."""
    made = Contact(clock=lambda: clock.now)
    made.heard()
    made.requested()
    return made


def after(clock: Clock, contact: Contact, seconds: float) -> None:
    """Let time pass; check every second, as in the agent."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 1.0
        contact.check()


@contextmanager
def watch(contact: Contact, clock: Clock) -> Iterator[None]:
    attempt = cast("Attempt", clock)
    contact.opened(attempt)
    yield
    contact.closed(attempt)


def test_an_outage_is_one_line_and_its_end_another(
    clock: Clock, contact: Contact, logged: list[dict[str, object]]
) -> None:
    """With the reason and the duration up to the next check, however many requests fail."""
    after(clock, contact, 9)
    assert not logged
    after(clock, contact, 1)
    for resource in ("services", "nodes"):
        contact.failed(Unreachable(f"no connection for {resource}"))
        after(clock, contact, 300)
    contact.heard()
    after(clock, contact, 60)
    assert logged == [
        {"event": "api server unavailable", "log_level": "warning", "reason": SILENT, "silence": "10.0s"},
        {
            "event": "api server available again",
            "log_level": "info",
            "reason": "no connection for nodes",
            "after": "611.0s",
        },
    ]


def test_an_outage_begins_when_the_last_response_breaks(
    clock: Clock, contact: Contact, logged: list[dict[str, object]]
) -> None:
    """Not with the next request."""
    contact.heard()
    contact.failed(Unreachable("reset"))
    after(clock, contact, 8)
    contact.requested()
    after(clock, contact, 2)
    assert [line["silence"] for line in logged] == ["10.0s"]


def test_a_server_that_refuses_is_available(
    clock: Clock, contact: Contact, logged: list[dict[str, object]]
) -> None:
    """In the pauses between requests too."""
    for _ in range(10):
        contact.requested()
        after(clock, contact, 2)
        contact.heard()
        contact.failed(Failure("not permitted (403)"))
        after(clock, contact, 30)
    assert not logged


def test_the_reason_is_that_of_the_last_failed_request(
    clock: Clock, contact: Contact, logged: list[dict[str, object]]
) -> None:
    """Not of one before the server was heard, nor of one that the server answered."""
    contact.failed(Unreachable("forgotten"))
    contact.heard()
    contact.failed(Failure("not permitted (403)"))
    contact.requested()
    assert not contact.outage()
    contact.failed(Unreachable("refused"))
    after(clock, contact, 10)
    assert [line["reason"] for line in logged] == ["refused"]


def test_a_short_outage_leaves_no_line(
    clock: Clock, contact: Contact, logged: list[dict[str, object]]
) -> None:
    for _ in range(10):
        contact.failed(Unreachable("refused"))
        after(clock, contact, 9)
        contact.heard()
        contact.requested()
    assert not logged


def test_acknowledgements_count_while_nothing_changes(
    clock: Clock, contact: Contact, logged: list[dict[str, object]]
) -> None:
    """For hours. But not once a request has no answer: a balancer or the kernel of a process that hangs acknowledges."""
    with watch(contact, clock):
        for _ in range(7200):
            clock.acknowledged = clock.now
            after(clock, contact, 1)
        contact.requested()
        contact.failed(Unreachable("connection refused", refused=True))
        after(clock, contact, 1)
        assert not logged
        contact.doubt()
        after(clock, contact, 1)
        contact.heard()
        after(clock, contact, 1)
    assert [line["event"] for line in logged] == ["api server unavailable", "api server available again"]
    assert logged[0]["silence"] == "7202.0s"


def test_a_broken_connection_counts_from_its_last_acknowledgement(
    clock: Clock, contact: Contact, logged: list[dict[str, object]]
) -> None:
    """Nothing else was due on it before."""
    with watch(contact, clock):
        for _ in range(600):
            clock.acknowledged = clock.now
            after(clock, contact, 1)
    contact.failed(Unreachable("reset"), clock.acknowledged)
    after(clock, contact, 8)
    assert not logged
    after(clock, contact, 1)
    assert [line["silence"] for line in logged] == ["10.0s"]


def test_missing_acknowledgements_are_an_outage(
    clock: Clock, contact: Contact, logged: list[dict[str, object]]
) -> None:
    """Long before the connection breaks; the first one ends it."""
    with watch(contact, clock):
        clock.acknowledged = 4.0
        after(clock, contact, 20)
        clock.acknowledged = 20.0
        after(clock, contact, 1)
    assert [(line["event"], line["reason"]) for line in logged] == [
        ("api server unavailable", "no packets arrive from the API server"),
        ("api server available again", "no packets arrive from the API server"),
    ]
    assert logged[1]["after"] == "16.0s"


def test_acknowledgements_on_other_connections_do_not_count(
    clock: Clock, contact: Contact, logged: list[dict[str, object]]
) -> None:
    """For example of a balancer without a server, before any response."""
    with watch(contact, clock):
        pass
    clock.acknowledged = 9.0
    after(clock, contact, 10)
    assert logged


def test_a_server_that_was_never_heard_is_logged_with_the_first_failure(
    clock: Clock, logged: list[dict[str, object]]
) -> None:
    """Its address may be wrong."""
    contact = Contact(clock=lambda: clock.now)
    after(clock, contact, 60)  # for example while it waits for another agent
    contact.requested()
    after(clock, contact, 2)
    assert not logged
    contact.failed(Unreachable("refused"))
    after(clock, contact, 100)
    assert [line["reason"] for line in logged] == ["refused"]
    contact.heard()
    contact.check()
    assert logged[1]["after"] == "102.0s"


@pytest.mark.parametrize(
    ("status", "heard"),
    [("200 OK", True), ("403 Forbidden", True), ("500 Oops", True), ("429 Slow", False), ("503 Away", False)],
)
def test_which_answers_count(status: str, heard: bool) -> None:
    """A balancer without a server answers 502 or 503, a server that serves nobody 429."""

    def answer(_: str, connection: socket.socket) -> None:
        connection.sendall(whole(b"{}", status))

    with CannedServer(answer) as api:
        client = Client(master=api.url, qps=-1)
        try:
            with client.stream("/", {}, resource="services", idle=5.0) as pieces:
                list(pieces)
        except Failure:
            pass
        assert (not client.contact.outage()) is heard
