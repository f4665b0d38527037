"""iptables-restore applies its input block by block: what a packet meets between two blocks."""

from collections.abc import Iterable, Iterator

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.sync.tables import FamilyTables
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
from tests.strategies import NAMES, NODE, events

NODE_IP = "192.168.99.10"


def on_terms(node_ports: tuple[str, ...] = ()) -> RuleContext:
    document = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clusterCIDR": "10.244.0.0/16",
        "nodePortAddresses": list(node_ports),
    }
    node = Node(NODE, (NODE_IP,), (), "zone-a")
    return rule_context(load(document, {}).config, NODE, node, KernelFacts((NODE_IP,)), Family.IPV4)


class BlockByBlock(FakeIptables):
    """Keeps the tables as they are after each block of the last restore."""

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
    """The blocks of restore input, each from the table's name to COMMIT."""
    for part in text.split("COMMIT\n")[:-1]:
        yield f"{part}COMMIT\n"


def fates(ruleset: Ruleset, packet: Packet) -> set[str]:
    """All that may become of a packet: an endpoint, REJECT, DROP, or "" if nobody takes care of it."""
    walker = Walker(ruleset)
    met = walker.walk(packet, "nat", "PREROUTING")
    found = {outcome.verdict for outcome in met if outcome.verdict}
    if any(not outcome.verdict for outcome in met):
        hook = "INPUT" if packet.local_destination else "FORWARD"
        found |= {outcome.verdict for outcome in walker.walk(packet, "filter", hook)}
    return found


WAYS = [
    *(
        (f"{net}.{n}", False)
        for net in ("10.96.0", "192.0.2", "198.51.100")
        for n in range(1, len(NAMES) + 1)
    ),
    (NODE_IP, True),
]


def packets() -> list[Packet]:
    """One for each way in to what the random services may have."""
    return [
        Packet(source, to, protocol, port, local_destination=local)
        for to, local in WAYS
        for port in ((30053, 30080) if local else (53, 80))
        for protocol in ("tcp", "udp")
        for source in ("10.244.1.77", "203.0.114.9")
    ]


def kinds(found: set[str]) -> set[str]:
    """Served, refused, or neither."""
    return {"served" if fate.startswith("to ") else "refused" if fate else "neither" for fate in found}


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    before=st.lists(events(), min_size=2, max_size=8),
    changes=st.lists(events(), min_size=1, max_size=3),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 4]),
)
def test_nothing_happens_between_blocks_that_neither_state_explains(
    before: list[Event], changes: list[Event], backend: Backend, chains_per_block: int | None
) -> None:
    """A packet meets what it met before or what it meets afterwards, whenever it comes."""
    cluster, live = Cluster(), BlockByBlock(backend)
    followed = FamilyTables(live, chains_per_block)
    touched = {key for event in before for key in cluster.apply(event)}
    followed.sync(cluster, touched, on_terms())
    first = live.save()
    live.states = []
    touched = {key for event in changes for key in cluster.apply(event)}
    followed.sync(cluster, touched, on_terms())
    between, last = live.states[:-1], live.save()
    if first == last:
        return
    for packet in packets():
        start, end = fates(first, packet), fates(last, packet)
        for state in between:
            now = fates(state, packet)
            assert {fate for fate in now if fate.startswith("to ")} <= start | end, packet
            expected = kinds(start) | kinds(end)
            # Who asks for a service that comes or goes this very moment may be refused as well.
            assert kinds(now) <= expected | ({"refused"} if "neither" in expected else set()), packet


class Refusing(BlockByBlock):
    """Refuses to translate to one endpoint, and keeps the tables as they are after each block of all restores."""

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
def test_nobody_is_harmed_while_services_are_tried(
    before: list[Event], changes: list[Event], backend: Backend, chains_per_block: int | None
) -> None:
    """Whatever is written to find out which service is refused, a packet meets what it met before, or afterwards."""
    bad = [Updated(service("bad", cluster_ip="10.99.0.1")), Updated(slice_of("10.244.9.9", service="bad"))]
    cluster, live = Cluster(), Refusing(backend)
    live.refuses = lambda rule: "--to-destination 10.244.9.9:" in rule
    followed = FamilyTables(live, chains_per_block)
    followed.sync(cluster, {key for event in before for key in cluster.apply(event)}, on_terms())
    first = live.save()
    live.states = []
    touched = {key for event in (*changes, *bad) for key in cluster.apply(event)}
    assert [it.name for it in followed.sync(cluster, touched, on_terms()).quarantined] == ["bad"]
    last = live.save()
    states = [state for at, state in enumerate(live.states) if state not in live.states[:at]]
    for packet in packets():
        start, end = fates(first, packet), fates(last, packet)
        expected = kinds(start) | kinds(end)
        for state in states:
            now = fates(state, packet)
            assert {fate for fate in now if fate.startswith("to ")} <= start | end, packet
            assert kinds(now) <= expected | ({"refused"} if "neither" in expected else set()), packet


def served_then_refused(*changes: Event) -> list[list[set[str]]]:
    """The kinds of fate of a packet to a service's IP, after each block of each change."""
    cluster, live = Cluster(), BlockByBlock()
    followed = FamilyTables(live, 200)
    packet = Packet("10.244.1.77", "10.96.0.10", "tcp", 80)
    seen: list[list[Ruleset]] = []
    for change in (Updated(service()), Updated(slice_of("10.244.1.5")), *changes):
        live.states = []
        followed.sync(cluster, cluster.apply(change), on_terms())
        seen.append(live.states)
    return [[kinds(fates(state, packet)) for state in states] for states in seen[2:]]


def test_a_service_that_loses_its_last_endpoint_is_refused_first() -> None:
    """filter goes before nat, so that no packet falls between; and nat before filter when endpoints are back."""
    gone = Updated(slice_of(endpoint("10.244.1.5", ready=False)))
    back = Updated(slice_of("10.244.1.6"))
    losing, coming_back = served_then_refused(gone, back)
    assert losing == [{"served"}, {"refused"}]
    assert coming_back == [{"served"}, {"served"}]


def test_a_deleted_service_goes_from_nat_first() -> None:
    """With nothing in filter, one block is all it takes."""
    (states,) = served_then_refused(Deleted(Kind.SERVICE, Key("ns", "web")))
    assert states == [{"neither"}]


def test_a_new_firewall_stands_before_its_way_is_taken() -> None:
    """A source that a load balancer's ranges shut out is not let through by a half-written table, nor lost."""
    open_ = service(
        type="LoadBalancer", load_balancer_ips=("198.51.100.1",), ports=(Port("http", Protocol.TCP, 80),)
    )
    shut = service(
        type="LoadBalancer",
        load_balancer_ips=("198.51.100.1",),
        source_ranges=("203.0.113.0/24",),
        ports=(Port("http", Protocol.TCP, 80),),
    )
    cluster, live = Cluster(), BlockByBlock()
    followed = FamilyTables(live, 1)
    stranger = Packet("203.0.114.9", "198.51.100.1", "tcp", 80)
    for change in (Updated(open_), Updated(slice_of("10.244.1.5")), Updated(shut)):
        live.states = []
        followed.sync(cluster, cluster.apply(change), on_terms())
    assert [kinds(fates(state, stranger)) for state in live.states] == [{"served"}, {"refused"}]


def test_one_service_goes_while_another_comes_back() -> None:
    """In one sync: the one is refused before nat changes, the other until nat has changed."""
    cluster, live = Cluster(), BlockByBlock()
    followed = FamilyTables(live, 200)
    other, unready = service("other", cluster_ip="10.96.0.11"), endpoint("10.244.1.6", ready=False)
    before = (service(), other, slice_of("10.244.1.5"), slice_of(unready, service="other"))
    after = (slice_of(endpoint("10.244.1.5", ready=False)), slice_of("10.244.1.6", service="other"))
    for objects in (before, after):
        live.states = []
        touched = {key for object_ in objects for key in cluster.apply(Updated(object_))}
        followed.sync(cluster, touched, on_terms())
    going = [kinds(fates(it, Packet("10.244.1.77", "10.96.0.10", "tcp", 80))) for it in live.states]
    coming = [kinds(fates(it, Packet("10.244.1.77", "10.96.0.11", "tcp", 80))) for it in live.states]
    assert going == [{"served"}, {"refused"}, {"refused"}]
    assert coming == [{"refused"}, {"served"}, {"served"}]
