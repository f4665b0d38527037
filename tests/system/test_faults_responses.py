"""Endless responses of an API server, and repeated or outdated events."""

import itertools
import json
import socket
import time
from contextlib import suppress

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.lab.apiserver import SERVICES
from pykubeproxy.objects import Key, Kind, Updated
from pykubeproxy.sources import Client, SourceError, api_watches
from pykubeproxy.sources.contact import Contact
from tests.fakes.canned import CHUNKED, CannedServer, chunk, whole
from tests.fakes.cluster import SHORT, server, service, watches
from tests.fakes.follower import Follower, eventually

BRIEF = msgspec.structs.replace(SHORT, list=0.5)


def reasons(lines: list[dict[str, object]]) -> list[str]:
    return [str(line.get("reason")) for line in lines if line["log_level"] == "warning"]


def test_an_endless_list_times_out() -> None:
    """Although data keeps coming; then it is retried."""
    with server() as api, capture_logs() as lines:
        api.store.create(service("a"))
        api.faults.drip(verb="list")
        with Follower(watches(api.url, Kind.SERVICE, BRIEF)) as follower:
            api.requests.wait(3, "list")
            assert not follower.events
            api.faults.clear()
            follower.sees("a")
        assert reasons(lines)[0] == "the API server's response takes too long"


def endless_pages(*names: str) -> CannedServer:
    """Return a server whose list never ends, with a new token and these Services on each page."""
    numbers = itertools.count()
    items = [{"metadata": {"name": name, "namespace": "default"}, "spec": {}} for name in names]

    def answer(target: str, connection: socket.socket) -> None:
        meta = {"resourceVersion": "5", "continue": f"t{next(numbers)}"}
        body = json.dumps({"kind": "ServiceList", "metadata": meta, "items": items}).encode()
        connection.sendall(whole(body, headers="Connection: close\r\n"))

    return CannedServer(answer)


def test_endless_empty_pages_are_a_failure() -> None:
    """Each page has another token. Twenty requests and one log line a list, and a pause after it."""
    with (
        endless_pages() as canned,
        capture_logs() as lines,
        Follower(watches(canned.url, Kind.SERVICE)) as follower,
    ):
        eventually(lambda: reasons(lines))
        assert len(canned.requests) >= 20
        (watch,) = follower.watches
        assert watch.list_outage
        assert watch.list_outage.reason == reasons(lines)[0]
    assert reasons(lines) == ["the API server's list has no end: 20 pages with 0 objects in all"]


def test_lists_fail_from_the_first_failure_to_the_next_list() -> None:
    """An API server that is away does not count: the pages of all nodes would show it."""
    with server() as api:
        (watch,) = watches(api.url, Kind.SERVICE)
        for fault, fails in ((403, True), (503, True), (500, True), (0, False), (503, False)):
            api.faults.clear()
            if fault:
                api.faults.fail(fault, verb="list")
            before = watch.list_outage
            with suppress(SourceError):
                watch.once()
            assert bool(watch.list_outage) is fails
            if before and watch.list_outage:
                assert watch.list_outage.seconds > before.seconds


def test_failed_lists_do_not_count_while_the_server_is_away() -> None:
    """An API server that ends may answer one more list with an error, on all nodes."""
    with server() as api:
        client = Client(master=api.url, qps=-1, contact=Contact(limit=0.3))
        watch = api_watches(client, "n1")[0]
        for status, fails in ((500, True), (503, False), (500, True)):
            api.faults.clear()
            api.faults.fail(status, verb="list")
            with suppress(SourceError):
                watch.once()
            eventually(lambda fails=fails: bool(watch.list_outage) is fails)  # type: ignore[misc]


def test_lists_are_limited_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before memory is exhausted."""
    monkeypatch.setattr("pykubeproxy.sources.lists._MAX_OBJECTS", 20)
    with endless_pages("a", "b") as canned:
        with pytest.raises(SourceError, match="has no end: more than 20 objects"):
            watches(canned.url, Kind.SERVICE)[0].once()
        assert len(canned.requests) == 11


def test_repeated_events_are_ignored() -> None:
    """An older version never replaces a newer one."""
    with server() as api:
        api.faults.echo()
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            api.requests.wait(1, "watch")
            api.store.create(service("a"))
            for port in range(81, 91):
                api.store.merge_patch(SERVICES, "default", "a", {"spec": {"ports": [{"port": port}]}})
            api.store.create(service("gone"))
            api.store.delete(SERVICES, "default", "gone")
            api.store.create(service("end"))
            follower.sees("a", "end")
            eventually(lambda: port_of(follower) == 90)
            ports = [it.object.ports[0].port for it in follower.events if isinstance(it, Updated)]
            assert [port for port in ports if port > 80] == sorted(port for port in ports if port > 80)
            assert follower.lists() == 1
            time.sleep(0.3)  # the last echo
            assert follower.names() == {"a", "end"}


def port_of(follower: Follower) -> int:
    it = follower.state[Kind.SERVICE].get(Key("default", "a"))
    return it.ports[0].port if it else 0


@pytest.mark.parametrize(
    "versions", [("7", "7", "7"), ("9", "8", "10"), ("b", "a", "c"), ("9" * 5000, "1", "2")]
)
def test_incomparable_versions_keep_the_last_event(versions: tuple[str, str, str]) -> None:
    """Equal versions, and versions that are no numbers."""
    meta = {"name": "a", "namespace": "default"}
    events = [
        {
            "type": "MODIFIED",
            "object": {
                "metadata": meta | {"resourceVersion": version},
                "spec": {"clusterIP": "10.96.0.9", "ports": [{"port": port}]},
            },
        }
        for port, version in enumerate(versions, 81)
    ]
    listed = {"kind": "ServiceList", "metadata": {"resourceVersion": "5"}, "items": []}

    def answer(target: str, connection: socket.socket) -> None:
        if "watch=true" in target:
            connection.sendall(CHUNKED)
            for event in events:
                connection.sendall(chunk(json.dumps(event).encode() + b"\n"))
            connection.recv(1)
        else:
            connection.sendall(whole(json.dumps(listed).encode()))

    with CannedServer(answer) as canned, Follower(watches(canned.url, Kind.SERVICE)) as follower:
        eventually(lambda: Kind.SERVICE in follower.state and port_of(follower) == 83)
