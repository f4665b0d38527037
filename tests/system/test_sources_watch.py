"""Watches of a healthy API server."""

import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy import __version__
from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, NODES, SERVICES
from pykubeproxy.objects import Deleted, EndpointSlice, Event, Kind, Listed, Node, Service, Updated
from pykubeproxy.sources import Client, api_watches
from tests.fakes.cluster import BOOKMARKS, SHORT, node, server, service, slice_of, watches
from tests.fakes.follower import Follower
from tests.fakes.waiting import eventually

RECORDED = Path(__file__).parent.parent / "data" / "requests.txt"


def test_selectors_are_sent_to_the_server() -> None:
    """The server sends only what this node's proxy needs."""
    with server() as api:
        api.store.load(
            [
                service("a"),
                service("headless", clusterIP="None"),
                service("other")
                | {
                    "metadata": {"name": "other", "labels": {"service.kubernetes.io/service-proxy-name": "x"}}
                },
                slice_of("a", "10.1.0.1"),
                slice_of("h") | {"metadata": {"name": "h", "labels": {"service.kubernetes.io/headless": ""}}},
                node("n1", "10.0.0.1"),
                node("n2", "10.0.0.2"),
            ]
        )
        with Follower(watches(api.url)) as follower:
            follower.sees("a")
            follower.sees("a", kind=Kind.ENDPOINT_SLICE)
            follower.sees("n1", kind=Kind.NODE)
            (only,) = follower.state[Kind.NODE].values()
            assert isinstance(only, Node)
            assert only.addresses == ("10.0.0.1",)


def test_requests_are_those_of_a_good_client() -> None:
    """One list from the server's cache in pages, then one watch with bookmarks, from the version of the list."""
    with server() as api:
        api.store.create(service("a"))
        with Follower(api_watches(Client(master=api.url), "n1")) as follower:
            follower.sees("a")
            api.requests.wait(1, "watch", "services")
            (first,), (watch,) = (
                api.requests.entries("list", "services"),
                api.requests.entries("watch", "services"),
            )
        assert first.user_agent == f"pykubeproxy/{__version__}"
        assert parse_qs(first.query) == {
            "labelSelector": ["!service.kubernetes.io/service-proxy-name"],
            "fieldSelector": ["spec.clusterIP!=None"],
            "limit": ["500"],
            "resourceVersion": ["0"],
        }
        parameters = parse_qs(watch.query)
        assert 300 <= int(parameters.pop("timeoutSeconds")[0]) <= 600
        assert parameters == {
            "labelSelector": ["!service.kubernetes.io/service-proxy-name"],
            "fieldSelector": ["spec.clusterIP!=None"],
            "watch": ["true"],
            "allowWatchBookmarks": ["true"],
            "resourceVersion": [str(api.store.version)],
        }


def test_the_same_objects_are_requested_as_by_kube_proxy() -> None:
    """With the same selectors; but no ServiceCIDRs, which mode iptables does not use."""

    def selected(line: str) -> tuple[str, ...]:
        verb, resource, query = line.split()
        fields = parse_qs(query)
        return (verb, resource, *(fields.get(name, [""])[0] for name in ("labelSelector", "fieldSelector")))

    theirs = {selected(line) for line in RECORDED.read_text().splitlines()[1:]}
    with server() as api:
        with Follower(api_watches(Client(master=api.url), "node1")):
            for _, resource, *_ in theirs:
                api.requests.wait("servicecidrs" not in resource, "watch", resource)
        ours = {selected(f"{one.verb} {one.resource} {one.query}") for one in api.requests.entries()}
    assert ours == {one for one in theirs if one[1] != "servicecidrs.networking.k8s.io"}


def test_objects_come_change_and_go() -> None:
    """Each change is one event with the new object; an object that leaves the selector is deleted."""
    with server() as api:
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            api.store.create(service("a"))
            api.store.merge_patch(SERVICES, "default", "a", {"spec": {"ports": [{"port": 81}]}})
            label = {"service.kubernetes.io/service-proxy-name": "other"}
            api.store.merge_patch(SERVICES, "default", "a", {"metadata": {"labels": label}})
            api.store.create(service("b"))
            api.store.delete(SERVICES, "default", "b")
            api.store.create(service("end"))
            follower.sees("end")
        kinds = [type(one) for one in follower.events]
        assert kinds == [Listed, Updated, Updated, Deleted, Updated, Deleted, Updated]
        changed = follower.events[2]
        assert isinstance(changed, Updated)
        assert isinstance(changed.object, Service)
        assert [one.port for one in changed.object.ports] == [81]


def test_list_in_pages() -> None:
    with server() as api:
        api.store.load(slice_of(f"s{i}", "10.1.0.1") for i in range(1201))
        watch = watches(api.url, Kind.ENDPOINT_SLICE)[0]
        (first,) = watch.once()
        assert len(first.objects) == 1201
        # The cache ignores the page size; a server that does not have the version must read the latest state in pages.
        api.faults.fail(410, verb="list")
        (second,) = watch.once()
        assert second.objects == first.objects
        assert any("continue=" in one.query for one in api.requests.entries("list"))


def test_later_lists_come_from_the_cache() -> None:
    """They are not older than the last event, and without a limit, which a cache does not serve at a version."""
    with server() as api:
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees()
            api.store.create(service("a"))
            follower.sees("a")
            seen = api.store.version
            api.requests.clear()
            api.faults.fail(410, verb="watch")
            api.faults.end_watches()
            api.requests.wait(1, "list")
        parameters = parse_qs(api.requests.entries("list")[0].query)
        assert parameters["resourceVersion"] == [str(seen)]
        assert not {"limit", "resourceVersionMatch"} & parameters.keys()


def test_a_server_that_does_not_have_the_version_lists_the_latest_state() -> None:
    """It answers 504 after a restore from a backup; the next request follows at once."""
    with server() as api:
        api.store.create(service("a"))
        watch = watches(api.url, Kind.SERVICE)[0]
        first = watch.once()
        api.requests.clear()
        api.faults.fail(504, verb="list")
        assert watch.once() == first
        assert ["resourceVersion=" in one.query for one in api.requests.entries("list")] == [True, False]


def test_list_that_expires_between_pages() -> None:
    with server() as api:
        api.store.load(slice_of(f"s{i}", "10.1.0.1") for i in range(1201))
        watch = watches(api.url, Kind.ENDPOINT_SLICE)[0]
        watch.once()
        api.requests.clear()
        api.faults.fail(410, verb="list")  # the version: the next list comes in pages
        answers: list[Listed] = []
        thread = threading.Thread(target=lambda: answers.extend(watch.once()))
        api.faults.delay(0.2, verb="list")
        thread.start()
        api.requests.wait(3, "list")  # the request for the second page waits
        api.store.create(slice_of("new", "10.1.0.2"))
        api.faults.compact()
        thread.join(10)
        assert len(answers[0].objects) == 1202
        assert sum("continue=" not in one.query for one in api.requests.entries("list")) == 3


def test_normal_end_of_a_watch_is_silent() -> None:
    """After its timeout a watch continues at the last version, without list, event or log line."""
    with server() as api, capture_logs() as lines:
        api.store.create(service("a"))
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees("a")
            for count in (1, 2, 3):
                api.requests.wait(count, "watch")
                time.sleep(2 * BOOKMARKS)  # let a bookmark pass: the server works
                api.faults.end_watches()
            api.requests.wait(4, "watch")
            api.store.create(service("b"))
            follower.sees("a", "b")
            assert follower.lists() == 1
        assert len(follower.events) == 2
        assert not lines


def test_bookmarks_move_the_version() -> None:
    """The next watch starts at the version of the last bookmark."""
    with server() as api, Follower(watches(api.url, Kind.SERVICE)) as follower:
        follower.sees()
        for i in range(5):
            api.store.create(slice_of(f"s{i}", "10.1.0.1"))
        last = api.store.version
        time.sleep(3 * BOOKMARKS)
        api.faults.end_watches()
        api.requests.wait(2, "watch")
        assert f"resourceVersion={last}&" in api.requests.entries("watch")[-1].query
        api.faults.compact()
        api.store.create(service("a"))
        follower.sees("a")
        assert follower.lists() == 1


def test_changes_arrive_soon() -> None:
    delays = []
    with server() as api, Follower(watches(api.url, Kind.SERVICE)) as follower:
        follower.sees()
        api.requests.wait(1, "watch")
        for i in range(50):
            started = time.perf_counter()
            api.store.create(service(f"s{i}"))
            while len(follower.events) < i + 2:
                time.sleep(0.0002)
            delays.append(time.perf_counter() - started)
    delays.sort()
    print(f"change seen after: median {delays[25] * 1e3:.1f} ms, worst {delays[-1] * 1e3:.1f} ms")
    assert delays[25] < 0.1


def test_nothing_is_missed_while_everything_changes() -> None:
    """With changes, renewals, dropped connections, ended watches and compactions at once, the last state is right.

    No object returns to an earlier state, except by a list.
    """
    draw = random.Random(7)
    restless = msgspec.structs.replace(SHORT, watch=(0, 1), steady=0.1)
    with server() as api, Follower(watches(api.url, timing=restless)) as follower:
        for step in range(600):
            name = f"s{draw.randrange(20)}"
            present = {one["metadata"]["name"] for one in api.store.list(ENDPOINT_SLICES)}
            if name in present and draw.random() < 0.3:
                api.store.delete(ENDPOINT_SLICES, "default", name)
            elif name in present:
                endpoints = [{"addresses": [f"10.1.{step // 250}.{step % 250}"]}]
                api.store.merge_patch(ENDPOINT_SLICES, "default", name, {"endpoints": endpoints})
            else:
                api.store.create(slice_of(name, f"10.2.{step // 250}.{step % 250}"))
            if draw.random() < 0.02:
                draw.choice([api.faults.drop_connections, api.faults.end_watches, api.faults.compact])()
            time.sleep(0.004)
        api.store.create(service("last"))

        def same() -> bool:
            expected = {
                one["metadata"]["name"]: one["endpoints"][0]["addresses"][0]
                for one in api.store.list(ENDPOINT_SLICES)
            }
            seen = follower.state.get(Kind.ENDPOINT_SLICE, {})
            return expected == {
                key.name: found.endpoints[0].address
                for key, found in seen.items()
                if isinstance(found, EndpointSlice)
            }

        eventually(same)
        follower.sees("last")
        eventually(
            lambda: follower.names(Kind.NODE) == {one["metadata"]["name"] for one in api.store.list(NODES)}
        )


def test_exception_of_the_consumer_passes_through() -> None:
    """It does not count as a fault of the server."""
    with server() as api:

        def broken(event: object) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            watches(api.url, Kind.SERVICE)[0].run(broken)


def test_changes_of_large_objects_hold_up_no_other_object() -> None:
    """Whoever changes a large object all the time: only the latest of the versions that wait is decoded."""
    ranges = {"type": "LoadBalancer", "loadBalancerSourceRanges": [f"10.0.{n}.0/24" for n in range(250)] * 8}
    held = threading.Event()
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        if updates(events, "last"):
            raise SystemExit
        assert isinstance(event, Listed) or held.wait(10)

    with server() as api:
        (watch,) = watches(api.url, Kind.SERVICE)

        def run() -> None:
            with suppress(SystemExit):
                watch.run(emit)

        thread = threading.Thread(target=run)
        thread.start()
        api.requests.wait(1, "watch")
        api.store.create(service("first"))
        for name in ("big", "shrunk", "gone"):
            api.store.create(service(name, **ranges))
        for number in range(1, 51):
            api.store.merge_patch(SERVICES, "default", "big", {"spec": {"ports": [{"port": number}]}})
        api.store.merge_patch(SERVICES, "default", "shrunk", {"spec": {"loadBalancerSourceRanges": None}})
        api.store.delete(SERVICES, "default", "gone")
        held.set()
        eventually(lambda: [one.ports[0].port for one in updates(events, "big")[-1:]] == [50])
        api.store.create(service("last"))
        thread.join(10)
    assert len(updates(events, "big")) < 25
    assert updates(events, "shrunk")[-1].source_ranges == ()
    about = [one for one in events if isinstance(one, Deleted) or updates([one], "gone")]
    assert not about or isinstance(about[-1], Deleted)


def updates(events: list[Event], name: str) -> list[Service]:
    """Return the versions of a Service that events have."""
    found = [it.object for it in events if isinstance(it, Updated) and isinstance(it.object, Service)]
    return [it for it in found if it.name == name]
