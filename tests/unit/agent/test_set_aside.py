"""When services are set aside and when the node is at fault."""

import re
from collections.abc import Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.quarantine import bisect, quarantine
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.agent.sync.tables import FamilyTables, SyncFailed
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Failed, Rejected
from pykubeproxy.kernel.errors import LockHeld
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.service import port_rules
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.resolve import resolve_ports
from tests.fakes.iptables import FakeIptables
from tests.objects import service, slice_of
from tests.reports import HERE

BAD = ("10.244.0.1:", "10.244.0.3:")


class Followed:
    """A cluster whose services have a number: it is in their name, their address, and that of their endpoint."""

    def __init__(self, backend: Backend) -> None:
        self.cluster = Cluster()
        self.live = FakeIptables(backend)
        self.live.refuses = lambda rule: any(f"--to-destination {bad}" in rule for bad in BAD)
        self.tables = FamilyTables(self.live, 200 if backend is Backend.NFT else None)

    def sync(self, *events: Event) -> SyncReport:
        touched = {key for event in events for key in self.cluster.apply(event)}
        on = rule_context(load(None, {}).config, HERE, None, KernelFacts(nfacct=False), Family.IPV4)
        return self.tables.sync(self.cluster, touched, on)

    def refused(self) -> int:
        return sum("REJECT" in rule for rule in self.live.save().chains[skeleton.FILTER_SERVICES])


def numbered(*numbers: int) -> list[Event]:
    return [
        event
        for number in numbers
        for event in (
            Updated(service(f"svc{number}", cluster_ip=f"10.96.{number // 250}.{number % 250}")),
            Updated(slice_of(f"10.244.{number // 250}.{number % 250}", service=f"svc{number}")),
        )
    ]


@pytest.fixture(params=[Backend.NFT, Backend.LEGACY], ids=lambda backend: backend.value)
def followed(request: pytest.FixtureRequest) -> Followed:
    return Followed(request.param)


@pytest.fixture
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    with capture_logs() as lines:
        yield lines


def names(done: SyncReport) -> list[str]:
    return [it.name for it in done.quarantined]


def test_two_among_two_thousand(followed: Followed) -> None:
    """They are found in a number of restores that grows with the logarithm of the number of services."""
    done = followed.sync(*numbered(*range(1, 2001)))
    assert names(done) == ["svc1", "svc3"]
    assert (done.services, followed.refused()) == (2000, 2)
    assert len(followed.live.texts) < 70


def test_a_kind_that_the_kernel_cannot_do(followed: Followed) -> None:
    """Some of each kind are tried first, which speak for their kind: nobody else is written before the end."""
    followed.live.refuses = lambda rule: "-m recent" in rule
    sticky = [
        Updated(service(f"svc{number}", cluster_ip=f"10.96.0.{number}", affinity_seconds=600))
        for number in range(1, 200, 2)
    ]
    done = followed.sync(*numbered(*range(1, 2001)), *sticky)
    assert set(names(done)) == {f"svc{number}" for number in range(1, 200, 2)}
    assert all(it.reason for it in done.quarantined)
    assert len(followed.live.texts) < 50
    # Which ones those are is up to chance.
    some = range(2, 2001, 20)
    written = [sum(f"ns/svc{number}:" in text for text in followed.live.texts) for number in some]
    assert sum(times > 4 for times in written) < 10
    assert sum(map(len, followed.live.texts)) < 2.2 * len(followed.live.texts[0])


def test_one_set_aside_costs_others_little(followed: Followed) -> None:
    """Its changes are tried by themselves: no full sync, and no rule of any other service is written for them."""
    followed.sync(*numbered(1, 2))
    followed.live.texts.clear()
    saves = followed.live.saves
    done = followed.sync(Updated(slice_of("10.244.0.1", "10.244.0.9", service="svc1")))
    assert (names(done), done.full, followed.live.saves) == (["svc1"], False, saves)
    assert not any("svc2" in text for text in followed.live.texts)


def test_a_change_of_others_does_not_try_it_again(followed: Followed) -> None:
    """Nothing is written for it."""
    followed.sync(*numbered(1, 2))
    followed.live.texts.clear()
    assert names(followed.sync(*numbered(5))) == ["svc1"]
    assert len(followed.live.texts) == 1
    assert "svc1:" not in "".join(line for line in followed.live.texts[0].split("\n") if "KUBE-SVC" in line)


def test_since_and_why_are_of_the_first_and_the_last_try(followed: Followed) -> None:
    """The time is not moved by tries in vain."""
    (first,) = followed.sync(*numbered(1)).quarantined
    (second,) = followed.sync(Updated(slice_of("10.244.0.1", "10.244.0.3", service="svc1"))).quarantined
    assert second.since == first.since
    assert second.reason


def test_the_node_is_at_fault(followed: Followed) -> None:
    """Where not even a plain service can be written, all is tried again later, and nobody set aside."""
    followed.live.refuses = lambda rule: "-j DNAT" in rule
    with pytest.raises(SyncFailed, match="rejected"):
        followed.sync(*numbered(1, 2))
    followed.live.refuses = lambda rule: False
    done = followed.sync()
    assert (done.quarantined, done.full) == ((), True)
    assert followed.refused() == 0


def test_a_fault_that_comes_while_they_are_told_apart(followed: Followed) -> None:
    """A plain service is tried in the end, too."""
    refuses = followed.live.refuses

    def worse(rule: str) -> bool:
        if refuses(rule):
            followed.live.refuses = lambda rule: "-j DNAT" in rule
        return refuses(rule)

    followed.live.refuses = worse
    with pytest.raises(SyncFailed):
        followed.sync(*numbered(*range(1, 9)))
    followed.live.refuses = refuses
    assert names(followed.sync()) == ["svc1", "svc3"]


@pytest.mark.parametrize(
    "error",
    [
        Failed("iptables-restore", -9, ""),
        LockHeld("/run/xtables.lock", 7),
        Rejected(4, "-A KUBE-SERVICES -j ACCEPT", "RULE_APPEND failed (Cannot allocate memory)", 4),
        Rejected(4, "COMMIT", "Memory allocation problem", 1),
    ],
)
def test_failures_that_no_service_can_be_blamed_for(followed: Followed, error: Exception) -> None:
    """One try, and the error as it is."""
    followed.live.failure = error  # type: ignore[assignment]
    followed.live.save = FakeIptables().save  # type: ignore[method-assign]
    with pytest.raises(SyncFailed) as caught:
        followed.sync(*numbered(1, 2))
    assert caught.value.error is error
    assert len(followed.live.texts) == 1


def test_when_time_is_up(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not known to be refused is not set aside; the sync fails, and the next ones find the rest."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(bisect, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(quarantine, "SEARCH_SECONDS", 3)
    followed.live.refuses = lambda rule: bool(re.search(r"--to-destination 10\S+[1-3]:", rule))
    bad = {f"svc{number}" for number in range(1, 60) if number % 10 in (1, 2, 3)}
    events, failures = numbered(*range(1, 60)), 0
    while True:
        try:
            done = followed.sync(*events)
            break
        except SyncFailed:
            events = []
            failures += 1
            assert failures <= len(bad)
    assert failures
    assert set(names(done)) == bad


def test_no_more_are_tried_when_time_is_up() -> None:
    """But for one to be found; the others are neither taken nor refused."""
    followed = Followed(Backend.LEGACY)
    for event in numbered(1, 2, 3, 4):
        followed.cluster.apply(event)
    on = rule_context(load(None, {}).config, HERE, None, KernelFacts(nfacct=False), Family.IPV4)
    items = [
        it
        for key in followed.cluster.services()
        for it in resolve_ports(followed.cluster, key.key, Family.IPV4, on.node)
    ]
    rendered = {it.port.name: port_rules(it.port, it.selection, on.options) for it in items}
    bisection = bisect.Bisection(followed.live, on.options, None, -1.0, lambda: None)
    taken, refused = bisection.split(rendered)
    assert [it.service for it in taken] == ["svc4"]
    assert [it.service for it in refused] == ["svc3"]


def test_a_refusal_by_chance() -> None:
    """Legacy refuses what it is given while somebody else writes, without a reason: that is nobody's fault."""
    followed = Followed(Backend.LEGACY)
    restore, chance = followed.live.restore, [("svc6",)] * 3

    def disturbed(text: str) -> None:
        own = tuple(sorted(set(re.findall(r"ns/(svc\d+):http cluster IP", text))))
        if own in chance:
            chance.remove(own)
            raise Rejected(1, "COMMIT", "the kernel rejected the block", 1)
        restore(text)

    followed.live.restore = disturbed  # type: ignore[method-assign]
    followed.live.refuses = lambda rule: "--to-destination 10.244.0.5:" in rule
    assert names(followed.sync(*numbered(5, 6))) == ["svc5"]
    assert not chance


def test_one_that_goes_while_syncs_fail(followed: Followed) -> None:
    """Nobody tells of it when the next sync is a full one, and still it is forgotten."""
    restore = followed.live.restore

    def failing(text: str) -> None:
        if "is quarantined" in text and "-A KUBE-PROXY-CANARY" not in text:
            raise Failed("iptables-restore", -9, "")
        restore(text)

    followed.live.restore = failing  # type: ignore[method-assign]
    for event in numbered(1, 2):
        followed.cluster.apply(event)
    with pytest.raises(SyncFailed):
        followed.sync()
    followed.live.restore = restore  # type: ignore[method-assign]
    followed.cluster.apply(Deleted(Kind.SERVICE, Key("ns", "svc1")))
    assert names(followed.sync()) == []


def test_taken_up_where_all_is_gone(followed: Followed) -> None:
    """The chains that every service jumps to need not be there for a try."""
    followed.sync(*numbered(1, 2))
    followed.live.refuses = lambda rule: False
    followed.live.tables.clear()
    followed.tables.require_resync()
    assert names(followed.sync()) == []


def test_progress_is_told(followed: Followed) -> None:
    """With every try."""
    told: list[int] = []
    followed.tables.quarantine.progress = lambda: told.append(len(followed.live.texts))
    followed.sync(*numbered(2, 4))
    assert not told
    followed.sync(*numbered(*range(5, 9), 1))
    # Not told of are both syncs, one of them begun anew, and three times of putting chains in order.
    assert len(told) == len(followed.live.texts) - 3 - 3
