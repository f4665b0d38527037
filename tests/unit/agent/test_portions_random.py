"""A Service that is written in portions keeps serving its endpoints after each block, whatever fails in between."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.sync import large, tables
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.agent.sync.write import SyncFailed
from pykubeproxy.kernel import Backend, Failed, KernelError
from pykubeproxy.objects import Deleted, EndpointPort, Event, Key, Kind, Port, Protocol, Updated
from pykubeproxy.rules import balancing, skeleton
from pykubeproxy.rules.digests import comparable
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from tests.objects import service, slice_of
from tests.packet_model import Packet, Walker
from tests.unit.rules.test_partial_syncs import context, empty_tables

CONTEXT = context((), False, "auto")
ADDRESS, EXTERNAL = "10.96.1.1", "192.0.2.1"
PORTS = {"a": 80, "b": 81, "c": 82, "d": 83}
# Ports that always exist, and a host that is always an endpoint of them.
LASTING, HOST = ("a", "b"), "10.244.2.1"


@pytest.fixture(autouse=True, scope="module")
def low_thresholds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "LARGE_PAIRS", 3)
        patch.setattr(large, "LEGACY_FACTOR", 1)
        patch.setattr(large, "PORT_PAIRS", 2)
        patch.setattr(large, "MOST_DELETED", 3)
        patch.setattr(tables, "_FEW_ENDPOINTS", 0)
        patch.setattr(balancing, "GROUPS_ABOVE", 3)
        yield


class Node:
    """A large Service, and the tables of one family: `_judge` runs after each block."""

    def __init__(self, backend: Backend, chains_per_block: int | None) -> None:
        self.live, self.cluster = empty_tables(backend), Cluster()
        self._chains_per_block = chains_per_block
        self.served: set[str] = set()
        self._blocks = 1000
        self._restore = self.live.restore
        self.live.restore = self._write  # type: ignore[method-assign]
        self.changed: set[Key] = set()
        self.restart()

    def restart(self) -> None:
        self.tables = FamilyTables(self.live, self._chains_per_block)
        self.sync()

    def apply(self, events: list[Event]) -> None:
        self.changed |= {key for event in events for key in self.cluster.apply(event)}

    def sync(self) -> None:
        changed, self.changed = self.changed, set()
        self._attempt(lambda: self.tables.sync(self.cluster, changed, CONTEXT))
        if self.tables.has_losses:
            self._attempt(lambda: self.tables.sync_losses(self.cluster, CONTEXT))

    def lose(self) -> None:
        if self.tables.has_losses:
            self._attempt(lambda: self.tables.sync_losses(self.cluster, CONTEXT))

    def turn(self) -> None:
        if self.tables.deferred:
            self._attempt(lambda: self.tables.sync_deferred(self.cluster, CONTEXT))

    def fail_after(self, blocks: int, work: Callable[["Node"], object]) -> None:
        self._blocks = blocks
        work(self)
        self._blocks = 1000

    def finish(self) -> None:
        self.sync()
        for _ in range(200):
            self.lose()
            self.turn()
        assert not self.tables.deferred

    def rules(self) -> dict[ChainKey, tuple[str, ...]]:
        """Return all rules, without the comments that do not count."""
        return {key: comparable(key, rules) for key, rules in self.live.save().chains.items()}

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (KernelError, SyncFailed):
            self.tables.require_resync()

    def _write(self, text: str) -> None:
        for block in filter(None, text.split("COMMIT\n")):
            if not self._blocks:
                raise Failed("iptables-restore", 1, "out of memory")
            self._blocks -= 1
            self._restore(f"{block}COMMIT\n")
            self._judge()

    def _judge(self) -> None:
        """A port that was served is served by the endpoint that it kept, and its packets go nowhere else."""
        live = self.live.save()
        walker = Walker(live)
        if skeleton.NAT_SERVICES not in live.chains:
            return
        for port in LASTING:
            packet = Packet("10.244.9.9", ADDRESS, "tcp", PORTS[port], states=frozenset({"NEW"}))
            verdicts = {it.verdict for it in walker.walk(packet, *skeleton.NAT_SERVICES)}
            rules = live.chains.get(skeleton.FILTER_SERVICES, ())
            rejected = any(f"--dport {PORTS[port]} " in rule for rule in rules)
            if f"to {HOST}:8080" in verdicts and not rejected:
                self.served.add(port)
            if port in self.served:
                assert not rejected
                assert f"to {HOST}:8080" in verdicts
                assert all(it.startswith("to 10.244.2.") for it in verdicts)


@st.composite
def changes(draw: st.DrawFn) -> list[Event]:
    """Return a new state of the Service: other ports, endpoints, addresses or affinity."""
    ports = {*LASTING, *draw(st.sets(st.sampled_from("cd")))}
    hosts = sorted({1, *draw(st.sets(st.integers(2, 9)))})
    made = service(
        "wide",
        cluster_ip=ADDRESS,
        ports=tuple(Port(it, Protocol.TCP, PORTS[it]) for it in sorted(ports)),
        external_ips=draw(st.sampled_from([(), (EXTERNAL,)])),
        affinity_seconds=draw(st.sampled_from([None, None, 60])),
    )
    targets = tuple(EndpointPort(it, Protocol.TCP, 8080) for it in sorted(ports))
    made_slice = slice_of(*(f"10.244.2.{host}" for host in hosts), service="wide", ports=targets)
    return draw(
        st.sampled_from([[Updated(made), Updated(made_slice)], [Updated(made)], [Updated(made_slice)]])
    )


WORK = st.sampled_from([Node.sync, Node.turn, Node.turn, Node.lose])
STEPS = st.one_of(
    st.builds(lambda it: lambda node: (node.apply(it), node.sync()), changes()),
    st.builds(lambda n, work: lambda node: node.fail_after(n, work), st.integers(0, 9), WORK),
    st.sampled_from([Node.turn, Node.turn, Node.turn, Node.lose, Node.sync, Node.restart]),
)


@settings(max_examples=150, deadline=None)
@given(
    first=changes(),
    steps=st.lists(STEPS, min_size=1, max_size=16),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 3, 200]),
)
def test_a_service_in_portions_serves_the_endpoints_that_it_keeps(
    first: list[Event], steps: list[Callable[[Node], object]], backend: Backend, chains_per_block: int | None
) -> None:
    node = Node(backend, chains_per_block)
    node.apply(first)
    node.finish()
    for step in steps:
        step(node)
    node.finish()
    fresh = Node(backend, None)
    fresh.cluster = node.cluster
    fresh.restart()
    fresh.finish()
    assert node.rules() == fresh.rules()
    node.served.clear()
    node.apply([Deleted(Kind.SERVICE, Key("ns", "wide"))])
    node.finish()
    assert not node.tables.services()
