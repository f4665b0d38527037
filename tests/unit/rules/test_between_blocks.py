"""Packets between two blocks of restore input, which iptables-restore applies one by one."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Deleted, Event, Key, Kind, Port, Protocol, Updated
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.ruleset import Ruleset
from tests.fakes.synced import NODE_IP, SyncedFamily, flags_context
from tests.objects import endpoint, service, slice_of
from tests.packet_model import Packet, Walker
from tests.strategies import INVALID_RANGE, NAMES, events

pytestmark = pytest.mark.usefixtures("small_trees")


class Node(SyncedFamily):
    """Tables that record their state after each block."""

    def __init__(
        self, *events: Event, chains_per_block: int | None = 200, dispatch: str = "auto", **options: Any
    ) -> None:
        self.states: list[Ruleset] = []
        super().__init__(
            *events,
            chains_per_block=chains_per_block,
            context=context(dispatch),
            after_block=lambda live: self.states.append(live.save()),
            **options,
        )
        self.write_block_by_block()

    def states_of(self, *events: Event) -> list[Ruleset]:
        """Sync after these events, and return the states meanwhile."""
        self.states.clear()
        self.sync(*events)
        return [*self.states]


def context(dispatch: str) -> RuleContext:
    return flags_context(cluster_cidr="10.244.0.0/16", dispatch=dispatch)


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
    node = Node(*before, backend=backend, chains_per_block=chains_per_block, dispatch=dispatch)
    node.sync()
    first = node.live.save()
    node.states.clear()
    node.apply(*changes)
    if restarted:
        node.restart()
    if other_dispatch:
        node.context = context("tree" if dispatch == "flat" else "flat")
    assert not node.sync().rejected_tree
    between, last = node.states[:-1], node.live.save()
    if first == last:
        return
    check(first, between, last)


def check(first: Ruleset, between: Iterable[Ruleset], last: Ruleset) -> None:
    for packet in packets():
        start, end = outcomes(first, packet), outcomes(last, packet)
        expected = kinds(start) | kinds(end)
        for state in between:
            current = outcomes(state, packet)
            assert {outcome for outcome in current if outcome.startswith("to ")} <= start | end, packet
            # Packets to a service that is being created or deleted may be refused as well.
            assert kinds(current) <= expected | ({"refused"} if "neither" in expected else set()), packet


@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    before=st.lists(events(), min_size=2, max_size=8),
    changes=st.lists(events(), min_size=1, max_size=3),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 4]),
)
def test_packets_during_a_search_meet_the_old_or_the_new_rules(
    before: list[Event], changes: list[Event], backend: Backend, chains_per_block: int | None
) -> None:
    """Neither tries nor what precedes them has an outcome of its own."""
    bad = [Updated(service("bad", cluster_ip="10.99.0.1")), Updated(slice_of("10.244.9.9", service="bad"))]
    node = Node(*before, backend=backend, chains_per_block=chains_per_block)
    node.live.rejects = lambda rule: "--to-destination 10.244.9.9:" in rule
    node.sync()
    first = node.live.save()
    node.states.clear()
    assert [it.name for it in node.sync_and_retry(*changes, *bad).quarantined] == ["bad"]
    states = [state for at, state in enumerate(node.states) if state not in node.states[:at]]
    check(first, states, node.live.save())


def kinds_by_block(*changes: Event) -> list[list[set[str]]]:
    """Return the kinds of outcome for a packet to a service, after each block of each change."""
    node, packet = Node(), Packet("10.244.1.77", "10.96.0.10", "tcp", 80)
    node.sync(Updated(service()), Updated(slice_of("10.244.1.5")))
    return [[kinds(outcomes(state, packet)) for state in node.states_of(change)] for change in changes]


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
    node, excluded = Node(chains_per_block=1), Packet("203.0.114.9", "198.51.100.1", "tcp", 80)
    node.sync(Updated(open_), Updated(slice_of("10.244.1.5")))
    states = node.states_of(Updated(restricted))
    assert [kinds(outcomes(state, excluded)) for state in states] == [{"served"}, {"refused"}]


def test_one_sync_removes_and_restores_endpoints_of_two_services() -> None:
    """One is refused before nat changes, the other until nat has changed."""
    other, unready = service("other", cluster_ip="10.96.0.11"), endpoint("10.244.1.6", ready=False)
    slices = (slice_of("10.244.1.5"), slice_of(unready, service="other"))
    after = (slice_of(endpoint("10.244.1.5", ready=False)), slice_of("10.244.1.6", service="other"))
    node = Node(Updated(service()), Updated(other), *map(Updated, slices))
    node.sync()
    states = node.states_of(*map(Updated, after))
    losing = [kinds(outcomes(it, Packet("10.244.1.77", "10.96.0.10", "tcp", 80))) for it in states]
    gaining = [kinds(outcomes(it, Packet("10.244.1.77", "10.96.0.11", "tcp", 80))) for it in states]
    assert losing == [{"served"}, {"refused"}, {"refused"}]
    assert gaining == [{"refused"}, {"served"}, {"served"}]
