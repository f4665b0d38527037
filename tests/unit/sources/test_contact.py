"""When the API server counts as unavailable, and the log of its outages."""

import math
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

import pytest

from pykubeproxy.sources import Client
from pykubeproxy.sources.attempt import Attempt
from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.failures import Failure, Unreachable
from tests.fakes.canned import CannedServer, whole

SILENT = "the API server sends nothing"


Lines = list[MutableMapping[str, Any]]


class World:
    """A contact that heard the server at the start and waits for the answer to the next request, and its clock."""

    def __init__(self) -> None:
        self.now, self.acknowledged = 0.0, -math.inf
        self.contact = Contact(clock=lambda: self.now)
        self.contact.heard()
        self.contact.requested()

    def unacknowledged(self) -> float:
        return self.now - self.acknowledged

    def after(self, seconds: float) -> None:
        """Let time pass; check every second, as in the agent."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.contact.check()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Open a watch, on whose connection packets are acknowledged."""
        attempt = cast("Attempt", self)
        self.contact.opened(attempt)
        yield
        self.contact.closed(attempt)


@pytest.fixture
def world() -> World:
    return World()


def test_an_outage_is_one_line_and_its_end_another(world: World, logged: Lines) -> None:
    """With the reason and the duration up to the next check, however many requests fail."""
    world.after(9)
    assert not logged
    world.after(1)
    for resource in ("services", "nodes"):
        world.contact.failed(Unreachable(f"no connection for {resource}"))
        world.after(300)
    world.contact.heard()
    world.after(60)
    assert logged == [
        {"event": "api server unavailable", "log_level": "warning", "reason": SILENT, "silence": "10.0s"},
        {
            "event": "api server available again",
            "log_level": "info",
            "reason": "no connection for nodes",
            "after": "611.0s",
        },
    ]


def test_an_outage_begins_when_the_last_response_breaks(world: World, logged: Lines) -> None:
    """Not with the next request."""
    world.contact.heard()
    world.contact.failed(Unreachable("reset"))
    world.after(8)
    world.contact.requested()
    world.after(2)
    assert [line["silence"] for line in logged] == ["10.0s"]


def test_a_server_that_refuses_is_available(world: World, logged: Lines) -> None:
    """In the pauses between requests too."""
    for _ in range(10):
        world.contact.requested()
        world.after(2)
        world.contact.heard()
        world.contact.failed(Failure("not permitted (403)"))
        world.after(30)
    assert not logged


def test_the_reason_is_that_of_the_last_failed_request(world: World, logged: Lines) -> None:
    """Not of one before the server was heard, nor of one that the server answered."""
    world.contact.failed(Unreachable("forgotten"))
    world.contact.heard()
    world.contact.failed(Failure("not permitted (403)"))
    world.contact.requested()
    assert not world.contact.outage()
    world.contact.failed(Unreachable("refused"))
    world.after(10)
    assert [line["reason"] for line in logged] == ["refused"]


def test_a_short_outage_leaves_no_line(world: World, logged: Lines) -> None:
    for _ in range(10):
        world.contact.failed(Unreachable("refused"))
        world.after(9)
        world.contact.heard()
        world.contact.requested()
    assert not logged


def test_acknowledgements_count_while_nothing_changes(world: World, logged: Lines) -> None:
    """For hours. But not once a request has no answer: a balancer or the kernel of a process that hangs acknowledges."""
    with world.watch():
        for _ in range(7200):
            world.acknowledged = world.now
            world.after(1)
        world.contact.requested()
        world.contact.failed(Unreachable("connection refused", refused=True))
        world.after(1)
        assert not logged
        world.contact.doubt()
        world.after(1)
        world.contact.heard()
        world.after(1)
    assert [line["event"] for line in logged] == ["api server unavailable", "api server available again"]
    assert logged[0]["silence"] == "7202.0s"


def test_a_broken_connection_counts_from_its_last_acknowledgement(world: World, logged: Lines) -> None:
    """Nothing else was due on it before."""
    with world.watch():
        for _ in range(600):
            world.acknowledged = world.now
            world.after(1)
    world.contact.failed(Unreachable("reset"), world.acknowledged)
    world.after(8)
    assert not logged
    world.after(1)
    assert [line["silence"] for line in logged] == ["10.0s"]


def test_a_response_that_breaks_is_no_request_without_an_answer(world: World) -> None:
    """A kubelet that hangs is no silent API server."""
    world.after(4)
    assert world.contact.unanswered() == 4
    world.contact.heard()
    world.after(30)
    world.contact.failed(Unreachable("no data", persistent=True), world.now)
    assert world.contact.unanswered() == 0


def test_missing_acknowledgements_are_an_outage(world: World, logged: Lines) -> None:
    """Long before the connection breaks; the first one ends it."""
    with world.watch():
        world.acknowledged = 4.0
        world.after(20)
        world.acknowledged = 20.0
        world.after(1)
    assert [(line["event"], line["reason"]) for line in logged] == [
        ("api server unavailable", "no packets arrive from the API server"),
        ("api server available again", "no packets arrive from the API server"),
    ]
    assert logged[1]["after"] == "16.0s"


def test_acknowledgements_on_other_connections_do_not_count(world: World, logged: Lines) -> None:
    """For example of a balancer without a server, before any response."""
    with world.watch():
        pass
    world.acknowledged = 9.0
    world.after(10)
    assert logged


def test_a_server_that_was_never_heard_is_logged_with_the_first_failure(world: World, logged: Lines) -> None:
    """Its address may be wrong."""
    world.contact = Contact(clock=lambda: world.now)
    world.after(60)  # for example while it waits for another agent
    world.contact.requested()
    world.after(2)
    assert not logged
    world.contact.failed(Unreachable("refused"))
    world.after(100)
    assert [line["reason"] for line in logged] == ["refused"]
    world.contact.heard()
    world.contact.check()
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
