"""Packets between two blocks of restore input, which iptables-restore applies one by one."""

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.agent.work import Changes
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Node, Port, Protocol, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster
from tests.fakes.iptables import FakeIptables
from tests.objects import endpoint, service, slice_of
from tests.packet_model import Packet, Walker
from tests.settings import HEADER
from tests.strategies import INVALID_RANGE, NAMES, NODE, events

NODE_IP = "192.168.99.10"

pytestmark = pytest.mark.usefixtures("small_trees")


def context(dispatch: str = "auto") -> RuleContext:
    document = {
        **HEADER,
        "clusterCIDR": "10.244.0.0/16",
        "pykubeproxy": {"dispatch": dispatch},
    }
    node = Node(NODE, (NODE_IP,), (), "zone-a")
    return rule_context(load(document, {}).config, NODE, node, KernelFacts((NODE_IP,)), Family.IPV4)


class TablesByBlock(FakeIptables):
    """Tables that record their state after each block of the last restore."""

    def __init__(self, backend: Backend = Backend.NFT) -> None:
        super().__init__(backend)
        self.counters.update(skeleton.NFACCT_NAMES)
        self.states: list[Ruleset] = []

    def restore(self, text: str | Iterable[str]) -> None:
        self.states = []
        for block in blocks("".join(text)):
            super().restore(block)
            self.states.append(self.save())


def blocks(text: str) -> Iterator[str]:
    """Return the blocks of restore input, each from its table line to COMMIT."""
    for part in text.split("COMMIT\n")[:-1]:
        yield f"{part}COMMIT\n"


def outcomes(ruleset: Ruleset, packet: Packet) -> set[str]:
    """Return all outcomes of a packet: an endpoint, REJECT, DROP, or "" if no rule decides."""
    walker = Walker(ruleset)
    nat_outcomes = walker.walk(packet, "nat", "PREROUTING")
    found = {outcome.verdict for outcome in nat_outcomes if outcome.verdict}
    if any(not outcome.verdict for outcome in nat_outcomes):
        hook = "INPUT" if packet.local_destination else "FORWARD"
        found |= {outcome.verdict for outcome in walker.walk(packet, "filter", hook)}
    return found


ADDRESSES = [
    *(
        (f"{net}.{n}", False)
        for net in ("10.96.0", "192.0.2", "198.51.100")
        for n in range(1, len(NAMES) + 1)
    ),
    (NODE_IP, True),
]


def packets() -> list[Packet]:
    """Return packets to all addresses that the random services may have."""
    return [
        Packet(source, to, protocol, port, local_destination=local)
        for to, local in ADDRESSES
        for port in ((30053, 30080) if local else (53, 80))
        for protocol in ("tcp", "udp")
        for source in ("10.244.1.77", "203.0.114.9")
    ]


def kinds(found: set[str]) -> set[str]:
    """Return the kinds of these outcomes: served, refused or neither."""
    return {
        "served" if outcome.startswith("to ") else "refused" if outcome else "neither" for outcome in found
    }


@settings(max_examples=100, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    before=st.lists(events(), min_size=2, max_size=8),
    changes=st.lists(events(), min_size=1, max_size=3),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 4]),
    dispatch=st.sampled_from(["flat", "tree"]),
    other_dispatch=st.booleans(),
    restarted=st.booleans(),
)
def test_packets_between_blocks_meet_the_old_or_the_new_rules(
    before: list[Event],
    changes: list[Event],
    backend: Backend,
    chains_per_block: int | None,
    dispatch: str,
    other_dispatch: bool,
    restarted: bool,
) -> None:
    """No intermediate state has an outcome of its own, also if an agent with another dispatch takes over."""
    cluster, live = Cluster(), TablesByBlock(backend)
    synced = FamilyTables(live, chains_per_block)
    changed = {key for event in before for key in cluster.apply(event)}
    synced.sync(cluster, Changes(changed), context(dispatch))
    first = live.save()
    live.states = []
    changed = {key for event in changes for key in cluster.apply(event)}
    if restarted:
        synced = FamilyTables(live, chains_per_block)
    if other_dispatch:
        dispatch = "tree" if dispatch == "flat" else "flat"
    assert not synced.sync(cluster, Changes(changed), context(dispatch)).rejected_tree
    between, last = live.states[:-1], live.save()
    if first == last:
        return
    for packet in packets():
        start, end = outcomes(first, packet), outcomes(last, packet)
        for state in between:
            current = outcomes(state, packet)
            assert {outcome for outcome in current if outcome.startswith("to ")} <= start | end, packet
            expected = kinds(start) | kinds(end)
            # Packets to a service that is being created or deleted may be refused as well.
            assert kinds(current) <= expected | ({"refused"} if "neither" in expected else set()), packet


class TablesByBlockOfAllRestores(TablesByBlock):
    """Tables that record their state after each block of all restores."""

    def restore(self, text: str | Iterable[str]) -> None:
        before = self.states
        try:
            super().restore(text)
        finally:
            self.states = before + self.states


@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    before=st.lists(events(), min_size=2, max_size=8),
    changes=st.lists(events(), min_size=1, max_size=3),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 4]),
)
def test_packets_during_a_bisection_meet_the_old_or_the_new_rules(
    before: list[Event], changes: list[Event], backend: Backend, chains_per_block: int | None
) -> None:
    """The trial restores of a bisection have no outcome of their own."""
    bad = [Updated(service("bad", cluster_ip="10.99.0.1")), Updated(slice_of("10.244.9.9", service="bad"))]
    cluster, live = Cluster(), TablesByBlockOfAllRestores(backend)
    live.rejects = lambda rule: "--to-destination 10.244.9.9:" in rule
    synced = FamilyTables(live, chains_per_block)
    synced.sync(cluster, Changes({key for event in before for key in cluster.apply(event)}), context())
    first = live.save()
    live.states = []
    changed = {key for event in (*changes, *bad) for key in cluster.apply(event)}
    assert [it.name for it in synced.sync(cluster, Changes(changed), context()).quarantined] == ["bad"]
    last = live.save()
    states = [state for at, state in enumerate(live.states) if state not in live.states[:at]]
    for packet in packets():
        start, end = outcomes(first, packet), outcomes(last, packet)
        expected = kinds(start) | kinds(end)
        for state in states:
            current = outcomes(state, packet)
            assert {outcome for outcome in current if outcome.startswith("to ")} <= start | end, packet
            assert kinds(current) <= expected | ({"refused"} if "neither" in expected else set()), packet


def kinds_by_block(*changes: Event) -> list[list[set[str]]]:
    """Return the kinds of outcome for a packet to a service, after each block of each change."""
    cluster, live = Cluster(), TablesByBlock()
    synced = FamilyTables(live, 200)
    packet = Packet("10.244.1.77", "10.96.0.10", "tcp", 80)
    states_by_change: list[list[Ruleset]] = []
    for change in (Updated(service()), Updated(slice_of("10.244.1.5")), *changes):
        live.states = []
        synced.sync(cluster, Changes(cluster.apply(change)), context())
        states_by_change.append(live.states)
    return [[kinds(outcomes(state, packet)) for state in states] for states in states_by_change[2:]]


def test_no_packet_is_lost_when_the_last_endpoint_goes_and_comes_back() -> None:
    """filter is written before nat when endpoints go, and after it when they return."""
    gone = Updated(slice_of(endpoint("10.244.1.5", ready=False)))
    back = Updated(slice_of("10.244.1.6"))
    losing, coming_back = kinds_by_block(gone, back)
    assert losing == [{"served"}, {"refused"}]
    assert coming_back == [{"served"}, {"served"}]


def test_a_deleted_service_without_filter_rules_takes_one_block() -> None:
    (states,) = kinds_by_block(Deleted(Kind.SERVICE, Key("ns", "web")))
    assert states == [{"neither"}]


@pytest.mark.parametrize("invalid", [False, True])
def test_new_source_ranges_never_admit_or_lose_a_packet(invalid: bool) -> None:
    """An excluded source is served before the change and refused after it; invalid ranges exclude every source."""
    open_ = service(
        type="LoadBalancer", load_balancer_ips=("198.51.100.1",), ports=(Port("http", Protocol.TCP, 80),)
    )
    restricted = service(
        type="LoadBalancer",
        load_balancer_ips=("198.51.100.1",),
        source_ranges=() if invalid else ("203.0.113.0/24",),
        rejected=(INVALID_RANGE,) if invalid else (),
        ports=(Port("http", Protocol.TCP, 80),),
    )
    cluster, live = Cluster(), TablesByBlock()
    synced = FamilyTables(live, 1)
    excluded = Packet("203.0.114.9", "198.51.100.1", "tcp", 80)
    for change in (Updated(open_), Updated(slice_of("10.244.1.5")), Updated(restricted)):
        live.states = []
        synced.sync(cluster, Changes(cluster.apply(change)), context())
    assert [kinds(outcomes(state, excluded)) for state in live.states] == [{"served"}, {"refused"}]


def test_one_sync_removes_and_restores_endpoints_of_two_services() -> None:
    """One is refused before nat changes, the other until nat has changed."""
    cluster, live = Cluster(), TablesByBlock()
    synced = FamilyTables(live, 200)
    other, unready = service("other", cluster_ip="10.96.0.11"), endpoint("10.244.1.6", ready=False)
    before = (service(), other, slice_of("10.244.1.5"), slice_of(unready, service="other"))
    after = (slice_of(endpoint("10.244.1.5", ready=False)), slice_of("10.244.1.6", service="other"))
    for objects in (before, after):
        live.states = []
        changed = {key for object_ in objects for key in cluster.apply(Updated(object_))}
        synced.sync(cluster, Changes(changed), context())
    losing = [kinds(outcomes(it, Packet("10.244.1.77", "10.96.0.10", "tcp", 80))) for it in live.states]
    gaining = [kinds(outcomes(it, Packet("10.244.1.77", "10.96.0.11", "tcp", 80))) for it in live.states]
    assert losing == [{"served"}, {"refused"}, {"refused"}]
    assert gaining == [{"refused"}, {"served"}, {"served"}]
