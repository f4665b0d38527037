"""The mailbox of the reconcile loop."""

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import cast

import msgspec
import pytest

from pykubeproxy.agent.mailbox import AddressesChanged, Mailbox, Stop
from pykubeproxy.agent.observe.status import LoopQuery
from pykubeproxy.kernel import ExternalWrite
from pykubeproxy.objects import Deleted, EndpointSlice, Event, Family, Key, Kind, Listed, Updated
from pykubeproxy.services.cluster import Cluster
from tests.fakes.waiting import eventually
from tests.objects import service, slice_of


def test_messages_arrive_in_order_and_wake_the_loop() -> None:
    mailbox, sent = Mailbox(), [Stop(number, "") for number in range(1000)]
    thread = threading.Thread(target=lambda: deque(map(mailbox.put, sent)))
    thread.start()
    got: list[object] = []
    while len(got) < len(sent):
        got += mailbox.take(math.inf)
    thread.join()
    assert got == sent
    assert mailbox.take(0) == []


def test_the_oldest_unhandled_message_counts() -> None:
    """While it waits, and while the loop handles it."""
    now = 0.0
    mailbox = Mailbox(lambda: now)
    assert mailbox.waiting_since() == math.inf
    now = 1.0
    mailbox.put(AddressesChanged())
    now = 2.0
    mailbox.put(AddressesChanged())
    assert mailbox.waiting_since() == 1.0
    assert mailbox.take(0) == [AddressesChanged()]
    now = 3.0
    mailbox.put(AddressesChanged())
    assert mailbox.waiting_since() == 1.0
    mailbox.handled()
    assert mailbox.waiting_since() == 3.0
    mailbox.take(0)
    mailbox.handled()
    assert mailbox.waiting_since() == math.inf


def test_a_stop_shows_before_the_loop_takes_it() -> None:
    """So a signal that arrives while modules are imported ends the process before it changes the node."""
    mailbox = Mailbox()
    mailbox.put(AddressesChanged())
    assert mailbox.stop() is None
    stops = Stop(0, "SIGTERM"), Stop(1, "later")
    for stop in stops:
        mailbox.put(stop)
    assert mailbox.stop() is stops[0]
    assert mailbox.take(0) == [AddressesChanged(), *stops]


def test_queries_do_not_count_as_waiting() -> None:
    mailbox, query = Mailbox(), LoopQuery(lambda *_: None, Future())
    mailbox.ask(query)
    assert mailbox.waiting_since() == math.inf
    assert mailbox.take(math.inf) == [query]


def named(name: str, *addresses: str, trigger: float | None = None) -> EndpointSlice:
    return msgspec.structs.replace(slice_of(*addresses), name=name, trigger_time=trigger)


def test_the_latest_event_of_each_object_is_kept() -> None:
    """Also of one that was deleted and created again, which other events do not change."""
    mailbox = Mailbox()
    web, slice_ = service(), named("web", "10.244.1.5")
    latest = service(cluster_ip="10.96.0.99")
    events: list[Event] = [
        Updated(web),
        Updated(named("web")),
        Updated(slice_),
        Deleted(Kind.SERVICE, web.key),
    ]
    for event in [*events, Updated(named("gone")), Deleted(Kind.ENDPOINT_SLICE, Key("ns", "gone"))]:
        mailbox.put(event)
    mailbox.put(Updated(latest))
    got = mailbox.take(0)
    assert len(got) == 3
    assert Updated(latest) in got
    assert Updated(slice_) in got
    assert Deleted(Kind.ENDPOINT_SLICE, Key("ns", "gone")) in got


def test_a_list_replaces_earlier_events_of_its_kind_only() -> None:
    mailbox, web = Mailbox(), service()
    listed = Listed(Kind.SERVICE, (web,))
    other, later = Updated(named("web")), Deleted(Kind.SERVICE, web.key)
    stop, gone = Stop(0, ""), Deleted(Kind.SERVICE, Key("ns", "x"))
    for message in (Updated(web), Listed(Kind.SERVICE, ()), gone, other, stop, listed, later):
        mailbox.put(message)
    assert mailbox.take(0) == [other, stop, listed, later]


def test_equal_messages_are_one() -> None:
    """Such as those of another program that writes rules during a long sync."""
    mailbox = Mailbox()
    for _ in range(100):
        mailbox.put(ExternalWrite.anywhere(Family.IPV4))
        mailbox.put(AddressesChanged())
    assert mailbox.take(0) == [ExternalWrite.anywhere(Family.IPV4), AddressesChanged()]


@pytest.mark.parametrize("seed", range(50))
def test_replaced_events_change_nothing(seed: int) -> None:
    """The cluster is the same as after all events in their order."""
    random = Random(seed)
    mailbox, clusters = Mailbox(), (Cluster(), Cluster())
    for _ in range(60):
        addresses = [f"10.244.1.{random.randrange(9)}" for _ in range(random.randrange(3))]
        objects = [named(f"s{random.randrange(4)}", *addresses) for _ in range(random.randrange(4))]
        choices: list[Event] = [
            Listed(Kind.ENDPOINT_SLICE, tuple({it.name: it for it in objects}.values())),
            Updated(named(f"s{random.randrange(4)}", *addresses)),
            Deleted(Kind.ENDPOINT_SLICE, Key("ns", f"s{random.randrange(4)}")),
        ]
        event = random.choice(choices)
        clusters[0].apply(event)
        mailbox.put(event)
    for message in mailbox.take(0):
        clusters[1].apply(cast("Event", message))
    before, after = ([*it.all_slices_of(Key("ns", "web"))] for it in clusters)
    assert before == after


def test_the_oldest_trigger_time_is_kept() -> None:
    """Unless the object was deleted in between."""
    mailbox = Mailbox()
    for trigger in (None, 20.0, None, 30.0, 40.0):
        mailbox.put(Updated(named("web", trigger=trigger)))
    (event,) = mailbox.take(0)
    assert isinstance(event, Updated)
    assert event.object == named("web", trigger=40.0)
    assert event.trigger_times() == (20.0, 40.0)
    for trigger in (20.0, 30.0):
        mailbox.put(Updated(named("web", trigger=trigger)))
        mailbox.put(Deleted(Kind.ENDPOINT_SLICE, Key("ns", "web")))
    mailbox.put(Updated(named("web", trigger=50.0)))
    (event,) = mailbox.take(0)
    assert event == Updated(named("web", trigger=50.0))


@pytest.mark.parametrize(
    "attack",
    [
        lambda number: Updated(named(f"s{number}", *["10.244.1.5"] * 98)),
        lambda number: Updated(
            msgspec.structs.replace(service(f"s{number}"), external_ips=("192.0.2.1",) * 98)
        ),
        lambda number: Deleted(Kind.SERVICE, Key("ns", f"s{number}")),
    ],
)
def test_queued_events_have_bounded_entries(
    monkeypatch: pytest.MonkeyPatch, attack: Callable[[int], Event]
) -> None:
    """The sender waits until the loop takes them; names of deleted objects count too. All events arrive."""
    monkeypatch.setattr("pykubeproxy.agent.mailbox._MOST_ENTRIES", 500)
    mailbox, sent = Mailbox(), [attack(number) for number in range(1200)]
    thread = threading.Thread(target=lambda: deque(map(mailbox.put, sent)), daemon=True)
    thread.start()
    most = 500 if isinstance(sent[0], Deleted) else 5
    eventually(lambda: len(mailbox._messages) == most)
    mailbox.put(stop := Stop(0, ""))  # never waits
    got = mailbox.take(0)
    assert got == [*sent[:most], stop]
    while len(got) <= len(sent):
        taken = mailbox.take(10)
        assert 0 < len(taken) <= most
        got += taken
    thread.join()
    got.remove(stop)
    assert got == sent


def test_an_event_about_a_large_object_need_not_wait_for_room() -> None:
    """If there is no other event, it would wait for ever."""
    mailbox = Mailbox()
    large = named("large", *["10.244.1.5"] * 150_000)
    for event in (Updated(large), Updated(large), Deleted(Kind.ENDPOINT_SLICE, large.key), Updated(large)):
        mailbox.put(event)
    assert mailbox.take(0) == [Updated(large)]
