"""A tenant's large Services fail anywhere; the Services of others must be served at each next sync."""

import itertools
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.sync import large
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.agent.sync.write import SyncFailed
from pykubeproxy.kernel import TABLES, Backend, Failed, KernelError
from pykubeproxy.objects import Deleted, EndpointPort, Event, Key, Kind, Port, Protocol, Updated
from pykubeproxy.rules import names
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from tests.fakes.drift import scope
from tests.objects import service, slice_of
from tests.unit.rules.test_partial_syncs import context, empty_tables

PORTS = ("a", "b", "c", "d", "e")
CONTEXT = context((), False, "flat")
INNOCENT = "innocent"


@pytest.fixture(autouse=True, scope="module")
def low_thresholds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Four ports alone make a Service large.
        patch.setattr(large, "LARGE_PAIRS", 3)
        patch.setattr(large, "PORT_PAIRS", 1)
        patch.setattr(large, "MOST_DELETED", 4)
        yield


def innocent(number: int, hosts: tuple[int, ...]) -> Event:
    made = slice_of(*(f"10.244.1.{host}" for host in hosts), service=f"s{number}")
    return Updated(msgspec.structs.replace(made, namespace=INNOCENT))


class Node:
    """A cluster with two Services of an innocent tenant, and the tables of one family.

    `broken` is a chain of a large Service that cannot be written.
    """

    def __init__(self, backend: Backend, chains_per_block: int | None) -> None:
        self.live, self.cluster = empty_tables(backend), Cluster()
        self.broken = ""
        self._chains_per_block = chains_per_block
        self._blocks = 1000
        self._changed: set[Key] = set()
        self._hosts = itertools.cycle([(), (1,), (2, 3)])
        self._restore = self.live.restore
        self.live.restore = self._write  # type: ignore[method-assign]
        for number in range(2):
            made = service(f"s{number}", cluster_ip=f"10.96.0.{number + 1}")
            self.apply(Updated(msgspec.structs.replace(made, namespace=INNOCENT)), innocent(number, (1,)))
        self.restart()

    def restart(self) -> None:
        """Start the agent; all chains can be written."""
        self.broken = ""
        self.tables = FamilyTables(self.live, self._chains_per_block)
        self.sync()

    def apply(self, *events: Event) -> None:
        self._changed |= {key for event in events for key in self.cluster.apply(event)}

    def sync(self) -> None:
        changed, self._changed = self._changed, set()
        self._attempt(lambda: self.tables.sync(self.cluster, changed, CONTEXT))
        if self.tables.has_losses and not self.tables.needs_resync:
            self._attempt(lambda: self.tables.sync_losses(self.cluster, CONTEXT))

    def turn(self) -> None:
        if self.tables.deferred:
            self._attempt(lambda: self.tables.sync_deferred(self.cluster, CONTEXT))

    def fail_after(self, blocks: int, work: Callable[["Node"], object]) -> None:
        """Let some work fail after some blocks."""
        self._blocks = blocks
        work(self)
        self._blocks = 1000

    def repair(self, chain: str) -> None:
        """Let another program flush a chain."""
        if chain in self.live.tables.get("nat", {}):
            self._restore(f"*nat\n:{chain} - [0:0]\nCOMMIT\n")
            self._attempt(lambda: self.tables.detect_drift(scope(TABLES)))
            self.sync()

    def judge(self) -> None:
        """Change the innocent's endpoints and sync; the rules must be right, whatever failed before."""
        self.apply(*(innocent(number, next(self._hosts)) for number in range(2)))
        self.sync()
        alone = Cluster()
        for made in self.cluster.services():
            if made.namespace == INNOCENT:
                alone.apply(Updated(made))
                for slice_ in self.cluster.all_slices_of(made.key):
                    alone.apply(Updated(slice_))
        expected, live = render(alone, CONTEXT), self.live.save()
        own = {key: rules for key, rules in expected.chains.items() if names.is_owned(key.chain)}
        assert {key: live.chains.get(key) for key in own} == own
        assert entries(live) == entries(expected)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (KernelError, SyncFailed):
            self.tables.require_resync()

    def _write(self, text: str) -> None:
        for block in filter(None, text.split("COMMIT\n")):
            written = f":{self.broken} " in block and f"-X {self.broken}\n" not in block
            if not self._blocks or (self.broken and written):
                raise Failed("iptables-restore", 1, "out of memory")
            self._blocks -= 1
            self._restore(f"{block}COMMIT\n")


def entries(ruleset: Ruleset) -> dict[str, list[str]]:
    """Return the rules of the innocent in chains that no service port owns."""
    shared = {key: rules for key, rules in ruleset.chains.items() if not names.is_owned(key.chain)}
    found = {str(key): [rule for rule in rules if f'"{INNOCENT}/' in rule] for key, rules in shared.items()}
    return {key: rules for key, rules in found.items() if rules}


@st.composite
def hostile_events(draw: st.DrawFn) -> list[Event]:
    """Return a new state of one of two large Services: at least four ports."""
    number = draw(st.integers(0, 1))
    name = f"large{number}"
    ports = draw(st.lists(st.sampled_from(PORTS), min_size=4, unique=True))
    hosts = draw(st.lists(st.integers(1, 5), max_size=4, unique=True))
    made = service(
        name,
        cluster_ip=f"10.96.1.{number}",
        ports=tuple(Port(it, Protocol.TCP, 80 + PORTS.index(it)) for it in sorted(ports)),
        external_ips=tuple(draw(st.sampled_from([(), ("192.0.2.1",), ("192.0.2.1", "192.0.2.2")]))),
        proxy_name=draw(st.sampled_from([None, None, None, "other"])),
    )
    targets = tuple(EndpointPort(it, Protocol.TCP, 8080) for it in ports)
    made_slice = slice_of(*(f"10.244.2.{host}" for host in sorted(hosts)), service=name, ports=targets)
    gone = Deleted(Kind.SERVICE, made.key)
    return draw(
        st.sampled_from(
            [[Updated(made), Updated(made_slice)], [Updated(made)], [Updated(made_slice)], [gone]]
        )
    )


BROKEN = st.sampled_from(
    [
        "",
        *(
            make(PortName("ns", f"large{n}", port, "TCP"))
            for n in range(2)
            for port in PORTS
            for make in (names.cluster_chain, names.external_chain)
        ),
        *(names.endpoint_chain(PortName("ns", "large0", port, "TCP"), "10.244.2.1:8080") for port in PORTS),
    ]
)
WORK = st.sampled_from([Node.sync, Node.turn])
STEPS = st.one_of(
    st.builds(lambda it: lambda node: node.apply(*it), hostile_events()),
    st.builds(lambda it: lambda node: (node.apply(*it), node.sync(), node.turn()), hostile_events()),
    st.builds(lambda n, work: lambda node: node.fail_after(n, work), st.integers(0, 9), WORK),
    st.builds(lambda it: lambda node: setattr(node, "broken", it), BROKEN),
    st.builds(lambda it: lambda node: node.repair(it), BROKEN),
    st.sampled_from([Node.turn, Node.turn, Node.restart]),
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=14),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 3, 200]),
)
def test_innocent_services_are_served_at_each_next_sync(
    steps: list[Callable[[Node], object]], backend: Backend, chains_per_block: int | None
) -> None:
    node = Node(backend, chains_per_block)
    for step in steps:
        step(node)
        node.judge()
    node.broken = ""
    node.sync()
    for _ in range(40):
        node.turn()
    assert not node.tables.deferred
    fresh = Node(backend, None)
    fresh.cluster = node.cluster
    fresh.restart()
    for _ in range(40):
        fresh.turn()
    assert node.live.save().chains == fresh.live.save().chains
