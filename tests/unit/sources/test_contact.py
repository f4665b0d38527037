"""When the API server counts as unavailable, and the log of its outages and of those of one watch."""

import socket
from collections.abc import MutableMapping
from typing import Any

import pytest

from pykubeproxy.sources import Client
from pykubeproxy.sources.contact import Contact, OutageLog
from pykubeproxy.sources.failures import Failure, Unreachable
from pykubeproxy.sources.watch import Outage
from tests.fakes.canned import CannedServer, whole

Lines = list[MutableMapping[str, Any]]
OWN, DEAD = Failure("forbidden"), Unreachable("refused")


@pytest.fixture
def contact(now: list[float]) -> Contact:
    """The contact of an agent that has just heard the server."""
    made = Contact()
    made.heard()
    return made


def visible(logged: Lines) -> Lines:
    return [line for line in logged if line["log_level"] != "debug"]


def test_an_outage_is_one_line_and_its_end_another(contact: Contact, now: list[float], logged: Lines) -> None:
    """After 10 s, with the last reason and the duration, however many requests fail."""
    started = now[0]
    contact.failed(Unreachable("reset"), started)
    for _ in range(9):
        now[0] += 1
        contact.failed(DEAD, now[0])
        assert not contact.outage()
    for _ in range(600):
        now[0] += 1
        contact.failed(DEAD, now[0])
        assert contact.outage() == "refused"
    contact.heard()
    assert not contact.outage()
    assert logged == [
        {"event": "api server unavailable", "log_level": "warning", "reason": "refused", "silence": "10.0s"},
        {
            "event": "api server available again",
            "log_level": "info",
            "reason": "refused",
            "after": "609.0s",
        },
    ]


def test_a_request_without_an_answer_counts_from_its_start(
    contact: Contact, now: list[float], logged: Lines
) -> None:
    now[0] += 15
    contact.failed(Unreachable("no response"), now[0] - 15)
    assert [line["silence"] for line in logged] == ["15.0s"]


def test_a_short_outage_leaves_no_line(contact: Contact, now: list[float], logged: Lines) -> None:
    for _ in range(10):
        contact.failed(DEAD, now[0])
        now[0] += 9
        contact.failed(DEAD, now[0])
        contact.heard()
        now[0] += 60
    assert not logged


def test_a_server_that_was_never_heard_is_logged_with_the_first_failure(
    now: list[float], logged: Lines
) -> None:
    """Its address may be wrong."""
    contact = Contact()
    contact.failed(DEAD, now[0])
    assert contact.outage() == "refused"
    assert [line["reason"] for line in logged] == ["refused"]


def test_while_a_watch_is_open_only_a_check_tells_that_the_server_is_away(
    contact: Contact, now: list[float], logged: Lines
) -> None:
    """Another watch may fail alone, for example because a balancer answers 503 for its path."""
    with contact.open_watch():
        for _ in range(30):
            contact.failed(DEAD, now[0])
            now[0] += 1
        assert not contact.outage()
        contact.check_failed(DEAD, now[0])
        assert contact.outage()
    assert len(logged) == 1


def test_watches_begin_anew_when_a_server_in_doubt_answers(contact: Contact, now: list[float]) -> None:
    """Data of an open watch is no answer, and there is no doubt without a check."""
    contact.failed(DEAD, now[0])
    contact.answered()
    assert contact.renewals == 0
    contact.check_failed(DEAD, now[0])
    contact.heard()
    assert (contact.renewals, contact.in_doubt) == (0, True)
    contact.answered()
    contact.answered()
    assert (contact.renewals, contact.in_doubt) == (1, False)


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
        assert (client.contact.silence() < 60) is heard
        assert (not client.unanswered()) is heard


def test_same_reason_is_logged_once_a_minute(contact: Contact, now: list[float], logged: Lines) -> None:
    """The first failure is logged, the same reason again only after a minute, another reason at once."""
    outages = OutageLog("services", contact)
    for _ in range(65):
        outages.failed(OWN, 1.0)
        now[0] += 2
    assert [line["reason"] for line in logged] == ["forbidden"] * 3
    outages.failed(Failure("timeout"), 1.0)
    assert logged[-1]["reason"] == "timeout"


def test_recovery_is_logged_once(contact: Contact, now: list[float], logged: Lines) -> None:
    """Recovery is one line with the time it took, and without an outage there is none."""
    outages = OutageLog("services", contact)
    outages.recovered()
    outages.failed(OWN, 1.0)
    now[0] += 7
    assert outages.outage() == Outage("services", 7.0, "forbidden")
    outages.recovered()
    assert outages.outage() is None
    outages.recovered()
    assert [(line["log_level"], line.get("after")) for line in logged] == [
        ("warning", None),
        ("info", "7.0s"),
    ]


def test_an_outage_of_the_server_is_no_line_of_a_watch(
    contact: Contact, now: list[float], logged: Lines
) -> None:
    """But the outage of each watch counts, from the last data of the server."""
    outages, other = OutageLog("services", contact), OutageLog("nodes", contact)
    now[0] += 5
    for _ in range(65):
        outages.failed(DEAD, 1.0)
        now[0] += 2
    assert outages.outage() == Outage("services", 135.0, "refused")
    assert other.outage() == Outage("nodes", 135.0, "refused")
    outages.recovered()
    assert [line["event"] for line in visible(logged)] == ["api server unavailable"]


def test_a_watch_that_fails_alone_is_logged(contact: Contact, now: list[float], logged: Lines) -> None:
    """Once it has failed for 10 s while another watch is open."""
    outages = OutageLog("services", contact)
    with contact.open_watch():
        for second in range(11):
            assert not visible(logged), second
            outages.failed(DEAD, 1.0)
            now[0] += 1
    outages.recovered()
    assert [line["event"] for line in visible(logged)] == ["watch failed", "watch recovered"]


def test_a_request_that_hangs_is_an_outage_before_it_fails(contact: Contact, now: list[float]) -> None:
    """Each part of a response ends it, and so does an answer."""
    outages = OutageLog("services", contact)
    for _ in range(3):
        outages.requested()
        now[0] += 9.9
        assert not outages.outage()
    now[0] += 0.1
    outage = outages.outage()
    assert outage
    assert outage.reason == "the API server sends nothing"
    outages.answered()
    assert not outages.outage()
