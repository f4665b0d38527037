"""The pending work of one family: what a sync takes, and what waits."""

import msgspec
import pytest

from pykubeproxy.agent.pending import Budget, Pending, Work
from pykubeproxy.agent.wanted import Wanted
from pykubeproxy.objects import Key, Kind, Listed, Port, Protocol
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from tests.fakes.synced import flags_context
from tests.objects import service

WEB, API = Key("ns", "web"), Key("other", "api")
HTTP, HTTPS = (PortName("ns", "web", name, "TCP") for name in ("http", "https"))
OTHER = PortName("other", "api", "", "TCP")


def wanted() -> Wanted:
    """Return a cluster with both Services."""
    made = Cluster()
    ports = (Port("http", Protocol.TCP, 80), Port("https", Protocol.TCP, 443))
    api = service("api", ports=(Port("", Protocol.TCP, 80),))
    made.apply(Listed(Kind.SERVICE, (service(ports=ports), msgspec.structs.replace(api, namespace="other"))))
    return Wanted(made, flags_context())


@pytest.fixture
def pending() -> Pending:
    """Pending work after a sync."""
    made = Pending(Budget())
    made.done(Work.CHANGES)
    return made


def test_a_failed_sync_keeps_what_it_took_up(pending: Pending) -> None:
    """Until one succeeds."""
    pending.changed({WEB: True, API: False})
    pending.losing.add(WEB, [HTTP])
    pending.failed(Work.LOSSES)
    assert pending.has_changes
    pending.done(Work.LOSSES)
    assert (pending.has_changes, bool(pending.losing)) == (False, True)


def test_only_a_changed_service_waits_for_a_turn(pending: Pending) -> None:
    """One that may have lost something loses it first; what has no rules has nothing to lose."""
    pending.changed({WEB: False})
    assert not pending.wait(WEB, [HTTP, HTTPS], [HTTP])
    assert not pending.wait(API, [OTHER], [])
    assert pending.next_turn(Work.TURN, wanted()) == {HTTP, HTTPS}
    assert not pending.losing
    pending.changed({WEB: True})
    pending.changed({WEB: False})
    assert pending.wait(WEB, [HTTP, HTTPS], [HTTP])
    assert pending.next_turn(Work.LOSSES, wanted()) == {HTTP}


def test_what_has_just_come_is_taken_before_what_has_failed(pending: Pending) -> None:
    pending.losing.add(WEB, [HTTP])
    assert pending.losing.has_new
    assert pending.next_turn(Work.LOSSES, wanted()) == {HTTP}
    pending.failed(Work.LOSSES)
    assert not pending.losing.has_new
    pending.losing.add(API, [OTHER])
    assert pending.losing.has_new
    assert [pending.next_turn(Work.LOSSES, wanted()) for _ in range(2)] == [{OTHER}, {HTTP}]


def test_those_whose_turn_it_was_go_to_the_end_of_the_queue(pending: Pending) -> None:
    """Behind all other namespaces, and behind other ports of their Service. After a failure, one port has a turn."""
    pending.changed({WEB: True, API: True})
    pending.wait(WEB, [HTTP, HTTPS], [])
    pending.wait(API, [OTHER], [])
    pending.failed(Work.TURN)
    turns = [pending.next_turn(Work.TURN, wanted()) for _ in range(4)]
    assert turns == [{HTTP}, {OTHER}, {HTTPS}, {OTHER}]
    pending.written({WEB}, deferred={HTTPS}, losing=())
    assert len(pending.deferred) == 2
    pending.done(Work.TURN)
    assert pending.next_turn(Work.TURN, wanted()) == {HTTPS, OTHER}
