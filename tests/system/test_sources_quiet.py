"""Watches of objects that nobody changes: silence is no outage, but a server that no longer answers is one."""

import json
import random
import socket
import time
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, Store
from pykubeproxy.objects import EndpointSlice, Kind, Listed, Updated
from pykubeproxy.sources import Client, Timing, Watch, api_watches
from pykubeproxy.sources.contact import Contact
from tests.fakes.canned import CHUNKED, CannedServer, whole
from tests.fakes.cluster import SHORT, server, service, slice_of
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.follower import Follower
from tests.fakes.relay import Relay
from tests.fakes.waiting import eventually

# About a fiftieth of the real times; an outage is visible after 0.2 s.
BRIEF = msgspec.structs.replace(SHORT, quiet=0.6, check=0.3, answer=0.6, steady=0.1)
LIMIT = 0.2


def quiet_server() -> FaultyApiServer:
    """Return a server whose etcd reports progress every ten minutes, so bookmarks come only after changes."""
    return server(store=Store())


def brief_watches(url: str, timing: Timing = BRIEF) -> tuple[Watch, ...]:
    return api_watches(Client(master=url, qps=-1, contact=Contact(limit=LIMIT)), "n1", timing)


def trouble(lines: list[Any]) -> list[Any]:
    """Return what is visible in a log."""
    return [line for line in lines if line["log_level"] != "debug"]


def outages(follower: Follower) -> list[str]:
    return [outage.reason for watch in follower.watches if (outage := watch.outage)]


def checks(api: FaultyApiServer) -> int:
    return sum(entry.path == "/version" for entry in api.requests.entries())


def test_silence_is_no_outage() -> None:
    """One check at a time shows that the server works. No watch begins anew, and a change arrives at once."""
    with quiet_server() as api, capture_logs() as lines:
        api.store.load([service("a"), slice_of("a", "10.1.0.1")])
        with Follower(brief_watches(api.url)) as follower:
            follower.sees("a")
            eventually(lambda: api.watches.running == 3)
            started = time.monotonic()
            while checks(api) < 4:
                assert not outages(follower)
                time.sleep(0.01)
            assert time.monotonic() - started > 3 * BRIEF.quiet
            api.store.create(service("b"))
            follower.sees("a", "b")
            assert (api.requests.count("list"), api.requests.count("watch")) == (3, 3)
        assert not trouble(lines)


def test_events_of_any_watch_spare_the_check() -> None:
    with quiet_server() as api, Follower(brief_watches(api.url)) as follower:
        follower.sees()
        eventually(lambda: api.watches.running == 3)
        before = checks(api)
        for number in range(30):
            api.store.create(slice_of(f"s{number}", "10.1.0.1"))
            time.sleep(BRIEF.quiet / 10)
        assert checks(api) == before


def test_a_watch_that_the_server_ends_is_followed_by_the_next() -> None:
    """From the last version: only the Node is listed again. Each change arrives once and in order."""
    draw = random.Random(3)
    often = msgspec.structs.replace(BRIEF, watch=(1, 1))
    with server() as api, capture_logs() as lines, Follower(brief_watches(api.url, often)) as follower:
        follower.sees(kind=Kind.ENDPOINT_SLICE)
        for name in "abcd":
            api.store.create(slice_of(name, "10.1.0.0"))
        for step in range(1, 801):
            endpoints = [{"addresses": [f"10.1.{step // 250}.{step % 250}"]}]
            api.store.merge_patch(ENDPOINT_SLICES, "default", draw.choice("abcd"), {"endpoints": endpoints})
            if step % 100 == 0:
                api.faults.end_watches()
            time.sleep(0.003)
        api.store.create(slice_of("end", "10.1.0.0"))
        follower.sees(*"abcd", "end", kind=Kind.ENDPOINT_SLICE)
        assert api.requests.count("watch", ENDPOINT_SLICES.qualified) > 5
        assert api.requests.count("list", ENDPOINT_SLICES.qualified) == 1
        assert api.requests.count("list", "nodes") > 1
    assert not trouble(lines)
    seen = [event.object for event in follower.events if isinstance(event, Updated)]
    addresses = [one.endpoints[0].address for one in seen if isinstance(one, EndpointSlice)]
    assert addresses[4:-1] == [f"10.1.{step // 250}.{step % 250}" for step in range(1, 801)]
    assert sum(isinstance(event, Listed) and event.kind is Kind.SERVICE for event in follower.events) == 1


@pytest.mark.parametrize("status", [429, 500, 401])
def test_a_check_that_is_refused_is_an_answer(status: int) -> None:
    """Open watches go on, and changes arrive."""
    with quiet_server() as api, capture_logs() as lines, Follower(brief_watches(api.url)) as follower:
        follower.sees()
        eventually(lambda: api.watches.running == 3)
        api.faults.fail(status, 100_000)
        eventually(lambda: checks(api) >= 3)
        assert not outages(follower)
        api.store.create(service("a"))
        follower.sees("a")
        assert api.watches.running == 3
        assert not trouble(lines)


def test_a_server_that_no_longer_answers_is_an_outage() -> None:
    """Its open watches go on: an event arrives. They begin anew when it answers again, without a list."""
    with quiet_server() as api, capture_logs() as lines, Follower(brief_watches(api.url)) as follower:
        follower.sees()
        eventually(lambda: api.watches.running == 3)
        api.faults.hang()
        started = time.monotonic()
        eventually(lambda: len(outages(follower)) == 3)
        assert time.monotonic() - started < BRIEF.quiet + BRIEF.check + LIMIT + 0.5
        assert all("no response from" in reason for reason in outages(follower))
        api.store.create(service("a"))
        follower.sees("a")
        api.faults.clear()
        eventually(lambda: not outages(follower))
        api.requests.wait(2, "watch", "services")
        api.store.create(service("b"))
        follower.sees("a", "b")
        assert follower.lists() == 1
    events = [line["event"] for line in trouble(lines)]
    assert events[0] == "api server unavailable"
    assert events[-1] == "api server available again"


@pytest.mark.parametrize("refuses", [False, True])
def test_a_balancer_without_a_server_is_an_outage(refuses: bool) -> None:
    """It acknowledges all packets. What its dead connections lost arrives once the server answers again."""
    with (
        quiet_server() as api,
        Relay(int(api.url.rpartition(":")[2])) as relay,
        Follower(brief_watches(f"http://127.0.0.1:{relay.port}")) as follower,
    ):
        follower.sees()
        eventually(lambda: api.watches.running == 3)
        relay.frozen.set()
        if refuses:
            relay.refuse()
        api.store.create(service("a"))
        started = time.monotonic()
        eventually(lambda: len(outages(follower)) == 3)
        assert time.monotonic() - started < BRIEF.quiet + BRIEF.check + LIMIT + 0.5
        if not refuses:
            relay.frozen.clear()
            follower.sees("a")
            eventually(lambda: not outages(follower))


def test_one_dead_connection_is_an_outage_when_the_watch_should_have_ended() -> None:
    """A server that works elsewhere answers all checks."""
    listed = {"kind": "ServiceList", "metadata": {"resourceVersion": "5"}, "items": []}

    def answer(target: str, connection: socket.socket) -> None:
        if "watch=true" in target:
            connection.sendall(CHUNKED)
            connection.recv(1)
        else:
            connection.sendall(whole(json.dumps(listed).encode()))

    with CannedServer(answer) as canned:
        watch, *_ = brief_watches(canned.url, msgspec.structs.replace(BRIEF, watch=(1, 1)))
        with Follower([watch]):
            started = time.monotonic()
            eventually(lambda: watch.outage)
            assert 1.0 + BRIEF.answer <= time.monotonic() - started < 1.0 + BRIEF.answer + 1.0
            assert watch.outage
            assert watch.outage.reason == "the API server did not end a watch in time"
