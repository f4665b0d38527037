"""Answers of an API server that have no end, and events that come twice or too late."""

import itertools
import json
import socket
import time

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.lab.apiserver import SERVICES
from pykubeproxy.objects import Key, Kind, Updated
from pykubeproxy.sources import SourceError
from tests.fakes.canned import CHUNKED, CannedServer, chunk, whole
from tests.fakes.cluster import SHORT, server, service, watches
from tests.fakes.follower import Follower, eventually

BRIEF = msgspec.structs.replace(SHORT, list=0.5, watch=(0, 0), idle=0.7)


def reasons(lines: list[dict[str, object]]) -> list[str]:
    return [str(line.get("reason")) for line in lines if line["log_level"] == "warning"]


def test_a_list_without_end_is_given_up() -> None:
    """One that always sends something and never the rest is not waited for for ever; then it is asked again."""
    with server() as api, capture_logs() as lines:
        api.store.create(service("a"))
        api.faults.drip(verb="list")
        with Follower(watches(api.url, Kind.SERVICE, BRIEF)) as follower:
            api.requests.wait(3, "list")
            assert not follower.events
            api.faults.clear()
            follower.sees("a")
        assert reasons(lines)[0] == "the API server's response takes too long"


def test_a_watch_that_drips_and_tells_nothing_is_given_up() -> None:
    """Blanks are a sign of life, but no event: past its time the watch is ended from here, and at last listed anew."""
    with server() as api:
        api.store.create(service("a"))
        api.faults.drip(verb="watch")
        with Follower(watches(api.url, Kind.SERVICE, BRIEF)) as follower:
            follower.sees("a")
            api.store.create(service("b"))
            follower.sees("a", "b")
            assert follower.lists() >= 2
            assert api.requests.count("watch") <= 2 * follower.lists()


def endless_pages(*names: str) -> CannedServer:
    """A server whose list always goes on, with another token and these Services on each page."""
    numbers = itertools.count()
    items = [{"metadata": {"name": name, "namespace": "default"}, "spec": {}} for name in names]

    def answer(target: str, connection: socket.socket) -> None:
        meta = {"resourceVersion": "5", "continue": f"t{next(numbers)}"}
        body = json.dumps({"kind": "ServiceList", "metadata": meta, "items": items}).encode()
        connection.sendall(whole(body, headers="Connection: close\r\n"))

    return CannedServer(answer)


def test_pages_without_end_are_given_up() -> None:
    """Though each has another token, and nothing on it."""
    with endless_pages() as canned, pytest.raises(SourceError, match="takes too long"):
        watches(canned.url, Kind.SERVICE, BRIEF)[0].once()


def test_more_objects_than_any_cluster_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that goes on past all reason is given up before memory ends."""
    monkeypatch.setattr("pykubeproxy.sources.api._MAX_OBJECTS", 20)
    with endless_pages("a", "b") as canned:
        with pytest.raises(SourceError, match="has no end: more than 20 objects"):
            watches(canned.url, Kind.SERVICE)[0].once()
        assert len(canned.requests) == 11


def test_events_that_come_again_are_the_past() -> None:
    """A server that repeats each event after the next one: what an object was does not replace what it is."""
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
            told = [it.object.ports[0].port for it in follower.events if isinstance(it, Updated)]
            assert [port for port in told if port > 80] == sorted(port for port in told if port > 80)
            assert follower.lists() == 1
            time.sleep(0.3)  # the last echo
            assert follower.names() == {"a", "end"}


def port_of(follower: Follower) -> int:
    it = follower.state[Kind.SERVICE].get(Key("default", "a"))
    return it.ports[0].port if it else 0


@pytest.mark.parametrize(
    "versions", [("7", "7", "7"), ("9", "8", "10"), ("b", "a", "c"), ("9" * 5000, "1", "2")]
)
def test_versions_of_every_kind(versions: tuple[str, str, str]) -> None:
    """Equal ones and such as are no numbers say nothing of what came first: then the last event counts."""
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
