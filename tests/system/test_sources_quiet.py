"""Watches of objects that nobody changes: silence is no outage, and each watch is followed by the next without a gap."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, SERVICES, Store
from pykubeproxy.objects import EndpointSlice, Kind, Listed, Service, Updated
from pykubeproxy.sources import Client, Timing
from pykubeproxy.sources.api import ApiWatch
from pykubeproxy.sources.connection import ConnectionState, Lifetime
from tests.fakes.cluster import SHORT, server, service, slice_of, watches
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.follower import Follower
from tests.fakes.relay import behind_a_relay
from tests.fakes.waiting import PATIENCE, eventually

# A watch is renewed within a second. The server keeps it a second longer.
BRIEF = msgspec.structs.replace(SHORT, watch=(1, 1), answer=1.0, steady=0.1)


def quiet_server() -> FaultyApiServer:
    """Return a server whose etcd reports progress every ten minutes, so bookmarks come only after changes."""
    return server(store=Store())


def test_quiet_resources_are_watched_without_a_gap() -> None:
    """Neither outages nor lists nor log lines; a change arrives at once after any number of renewals."""
    with quiet_server() as api, capture_logs() as lines:
        api.store.load([service("a"), slice_of("a", "10.1.0.1")])
        with Follower(watches(api.url, timing=BRIEF)) as follower:
            follower.sees("a")
            eventually(lambda: api.watches.running == 3)
            while api.requests.count("watch", "services") < 5:
                assert api.watches.running >= 3
                assert not [watch.outage for watch in follower.watches if watch.outage]
                time.sleep(0.01)
            api.store.create(service("b"))
            follower.sees("a", "b")
        assert api.requests.count("list") == 3
        assert not lines


def test_changes_during_renewals_arrive_once_and_in_order() -> None:
    """Each version of each object, whichever of two watches carries it."""
    draw = random.Random(3)
    busy = msgspec.structs.replace(BRIEF, watch=(0, 0), steady=0.05)
    with server() as api, Follower(watches(api.url, Kind.ENDPOINT_SLICE, busy)) as follower:
        follower.sees(kind=Kind.ENDPOINT_SLICE)
        for name in "abcd":
            api.store.create(slice_of(name, "10.1.0.0"))
        for step in range(1, 801):
            endpoints = [{"addresses": [f"10.1.{step // 250}.{step % 250}"]}]
            api.store.merge_patch(ENDPOINT_SLICES, "default", draw.choice("abcd"), {"endpoints": endpoints})
            time.sleep(0.003)
        eventually(lambda: len(follower.events) >= 805)
        api.store.create(slice_of("end", "10.1.0.0"))
        follower.sees(*"abcd", "end", kind=Kind.ENDPOINT_SLICE)
        renewals = api.requests.count("watch")
    assert renewals > 10
    assert sum(isinstance(event, Listed) for event in follower.events) == 1
    seen = [event.object for event in follower.events if isinstance(event, Updated)]
    assert all(isinstance(one, EndpointSlice) for one in seen)
    addresses = [one.endpoints[0].address for one in seen if isinstance(one, EndpointSlice)]
    assert addresses[4:-1] == [f"10.1.{step // 250}.{step % 250}" for step in range(1, 801)]


def test_ever_new_names_between_two_checks_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever creates and deletes 200 objects a second does so 120,000 times until the next check."""
    monkeypatch.setattr("pykubeproxy.sources.tracker._MOST_VERSIONS", 40)
    with server() as api, Follower(watches(api.url, Kind.SERVICE)) as follower:
        follower.sees()
        api.requests.wait(1, "watch")
        time.sleep(2 * SHORT.steady)
        for number in range(100):
            api.store.create(service(f"a-{number}"))
            api.store.delete(SERVICES, "default", f"a-{number}")
        api.store.create(service("end"))
        follower.sees("end")
        (watch,) = follower.watches
        assert isinstance(watch, ApiWatch)
        assert len(watch._tracker._versions) <= 41
        assert len(follower.events) == 202
    assert api.requests.count("watch") == 1


@pytest.mark.parametrize("status", [429, 503, 500, 401])
def test_a_refused_check_keeps_the_open_watch(status: int) -> None:
    """That is no outage: changes arrive meanwhile."""
    with quiet_server() as api, capture_logs() as lines:
        with Follower(watches(api.url, Kind.SERVICE, patient())) as follower:
            follower.sees()
            api.requests.wait(1, "watch")
            api.faults.fail(status, 100_000, verb="watch")
            api.requests.wait(3, "watch")
            api.store.create(service("a"))
            follower.sees("a")
            assert api.watches.running == 1
            assert not follower.watches[0].outage
            api.faults.clear()
            eventually(lambda: api.watches.running == 2)
            eventually(lambda: api.watches.running == 1)
            api.store.create(service("b"))
            follower.sees("a", "b")
            assert follower.lists() == 1
        assert not lines


def patient() -> Timing:
    """Return times with which a watch lasts long enough for many checks."""
    return msgspec.structs.replace(BRIEF, answer=10.0)


def test_a_check_without_an_answer_is_an_outage_back_to_the_last_answer() -> None:
    """But the open watch goes on, and an event on it ends the outage."""
    with quiet_server() as api:
        (watch,) = watches(api.url, Kind.SERVICE, BRIEF)
        with Follower([watch]) as follower:
            follower.sees()
            api.requests.wait(1, "watch")
            started = time.monotonic()
            api.faults.hang(verb="watch")
            # A check hangs by then; the server leaves the open watch alone.
            eventually(lambda: watch.outage)
            assert watch.outage
            assert watch.outage.seconds >= time.monotonic() - started - 0.2
            assert "no response from" in watch.outage.reason
            api.faults.clear()
            api.store.create(service("a"))
            follower.sees("a")
            eventually(lambda: not watch.outage)
        assert follower.lists() == 1


def test_an_expired_check_lists_once_while_the_open_watch_goes_on() -> None:
    """410, as from another server that has started since: no gap, no warning, and equal objects."""
    with quiet_server() as api, capture_logs() as lines:
        api.store.create(service("a"))
        with Follower(watches(api.url, Kind.SERVICE, patient())) as follower:
            follower.sees("a")
            api.requests.wait(1, "watch")
            api.faults.fail(410, verb="watch")
            api.requests.wait(2, "watch")
            assert api.watches.running == 1
            api.requests.wait(2, "list")
            eventually(lambda: follower.lists() == 2)
            api.store.create(service("b"))
            follower.sees("a", "b")
            assert not follower.watches[0].outage
            first, second = (event for event in follower.events if isinstance(event, Listed))
            assert first == second
        assert not lines


def test_a_list_without_an_answer_after_an_expired_check_is_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meanwhile the open watch goes on, and its next event ends the outage."""
    monkeypatch.setattr(ConnectionState, "lifetime", lambda _: Lifetime(check=0.5, end=60))
    with quiet_server() as api:
        (watch,) = watches(api.url, Kind.SERVICE, BRIEF)
        with Follower([watch]) as follower:
            follower.sees()
            eventually(lambda: api.watches.running == 1)
            api.faults.hang(verb="list")
            api.faults.fail(410, verb="watch")
            eventually(lambda: watch.outage)
            assert watch.outage
            assert "no response from" in watch.outage.reason
            assert api.watches.running == 1
            api.store.create(service("a"))
            follower.sees("a")  # the next list hangs too
            eventually(lambda: not watch.outage)
            api.faults.clear()


def test_events_during_a_list_arrive_at_once_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of an expired check is older than they are: no object returns to an earlier state, and none reappears."""
    exchange = Client._exchange

    def slowly(client: Client, request: Any, *others: Any) -> Iterator[bytes]:
        parts = exchange(client, request, *others)
        yield next(parts)
        if request.compressible and api.requests.count("watch"):  # a later list
            answered.set()
            arrived.wait(PATIENCE)
        yield from parts

    answered, arrived = threading.Event(), threading.Event()
    monkeypatch.setattr(Client, "_exchange", slowly)
    with quiet_server() as api:
        api.store.load([service(name) for name in ("changed", "deleted", "kept")])
        with Follower(watches(api.url, Kind.SERVICE, patient())) as follower:
            follower.sees("changed", "deleted", "kept")
            api.requests.wait(1, "watch")
            api.faults.fail(410, verb="watch")
            api.requests.wait(2, "list")
            assert answered.wait(PATIENCE)
            api.store.merge_patch(SERVICES, "default", "changed", {"spec": {"ports": [{"port": 81}]}})
            api.store.delete(SERVICES, "default", "deleted")
            api.store.create(service("new"))
            follower.sees("changed", "kept", "new")
            assert follower.lists() == 1
            arrived.set()
            eventually(lambda: follower.lists() == 2)
            api.store.create(service("end"))
            follower.sees("changed", "kept", "new", "end")
        assert [type(event).__name__ for event in follower.events] == [
            "Listed",
            *("Updated", "Deleted", "Updated"),
            "Listed",
            "Updated",
        ]
        listed = follower.events[4]
        assert isinstance(listed, Listed)
        objects = {one.key.name: one for one in listed.objects}
        assert objects.keys() == {"changed", "kept", "new"}
        changed = objects["changed"]
        assert isinstance(changed, Service)
        assert [one.port for one in changed.ports] == [81]


def test_a_watch_that_the_server_never_ends_is_an_outage() -> None:
    """Its checks are refused, so only its age tells that its server is gone: a balancer keeps the connection."""
    with quiet_server() as api, behind_a_relay(api, BRIEF) as (relay, follower):
        (watch,) = follower.watches
        relay.refuse()
        relay.frozen.set()
        started = time.monotonic()
        eventually(lambda: watch.outage)
        assert watch.outage
        assert watch.outage.seconds >= time.monotonic() - started - 0.2


def test_bookmarks_of_a_watch_do_not_skip_what_it_lost() -> None:
    """A check that gets an answer late begins where the first one did, so it repeats what a dead connection lost."""
    with server() as api, behind_a_relay(api, BRIEF) as (relay, follower):
        (watch,) = follower.watches
        relay.frozen.set()
        api.store.create(service("a"))
        eventually(lambda: watch.outage)
        relay.frozen.clear()
        follower.sees("a")
        assert Counter(type(event).__name__ for event in follower.events)["Updated"] == 1
