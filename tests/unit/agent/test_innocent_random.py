"""A tenant's large Services fail anywhere; the Services of others must be served at each next sync."""

import itertools
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.agent import coverage
from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Deleted, EndpointPort, Event, Kind, Port, Protocol, Updated
from pykubeproxy.rules import names
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from tests.fakes.synced import SyncedFamily
from tests.objects import service, slice_of
from tests.unit.rules.test_partial_syncs import context

PORTS = ("a", "b", "c", "d", "e")
CONTEXT = context((), False, "flat")
INNOCENT = "innocent"


@pytest.fixture(autouse=True, scope="module")
def low_thresholds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Four ports alone make a Service large.
        patch.setattr(coverage, "LARGE_PAIRS", 3)
        patch.setattr(coverage, "PORT_PAIRS", 1)
        patch.setattr(coverage, "MOST_DELETED", 4)
        yield


def innocent(number: int, hosts: tuple[int, ...]) -> Event:
    made = slice_of(*(f"10.244.1.{host}" for host in hosts), service=f"s{number}")
    return Updated(msgspec.structs.replace(made, namespace=INNOCENT))


def innocent_services() -> list[Event]:
    """Return two Services of an innocent tenant, with an endpoint each."""
    made = [service(f"s{number}", cluster_ip=f"10.96.0.{number + 1}") for number in range(2)]
    services = [Updated(msgspec.structs.replace(it, namespace=INNOCENT)) for it in made]
    return [*services, *(innocent(number, (1,)) for number in range(2))]


def node(backend: Backend, chains_per_block: int | None) -> SyncedFamily:
    """Return tables with two Services of an innocent tenant."""
    made = SyncedFamily(context=CONTEXT, backend=backend, chains_per_block=chains_per_block)
    made.write_block_by_block()
    made.round(*innocent_services())
    return made


def flush(node: SyncedFamily, chain: str) -> None:
    """Let another program flush a chain, and repair that."""
    if chain in node.live.tables.get("nat", {}):
        node.live.tables["nat"] = {**node.live.tables["nat"], chain: ()}
        node.repair()


def judge(node: SyncedFamily, hosts: Iterator[tuple[int, ...]]) -> None:
    """Change the innocent's endpoints and sync; the rules must be right, whatever failed before."""
    node.round(*(innocent(number, next(hosts)) for number in range(2)))
    alone = Cluster()
    for made in node.cluster.services():
        if made.namespace == INNOCENT:
            alone.apply(Updated(made))
            for slice_ in node.cluster.all_slices_of(made.key):
                alone.apply(Updated(slice_))
    expected, live = render(alone, CONTEXT), node.live.save()
    own = {key: rules for key, rules in expected.chains.items() if names.is_owned(key.chain)}
    assert {key: live.chains.get(key) for key in own} == own
    assert entries(live) == entries(expected)


def restart(node: SyncedFamily) -> None:
    node.restart()
    node.round()


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
WORK = st.sampled_from([SyncedFamily.round, SyncedFamily.turn_if_due])
STEPS = st.one_of(
    st.builds(lambda it: lambda node: node.apply(*it), hostile_events()),
    st.builds(lambda it: lambda node: (node.round(*it), node.turn_if_due()), hostile_events()),
    st.builds(lambda n, work: lambda node: node.fail_after(n, work), st.integers(0, 9), WORK),
    st.builds(lambda it: lambda node: setattr(node, "broken", it), BROKEN),
    st.builds(lambda it: lambda node: flush(node, it), BROKEN),
    st.sampled_from([SyncedFamily.turn_if_due, SyncedFamily.turn_if_due, restart]),
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=14),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 3, 200]),
)
def test_innocent_services_are_served_at_each_next_sync(
    steps: list[Callable[[SyncedFamily], object]], backend: Backend, chains_per_block: int | None
) -> None:
    world, hosts = node(backend, chains_per_block), itertools.cycle([(), (1,), (2, 3)])
    for step in steps:
        step(world)
        judge(world, hosts)
    world.broken = ""
    world.settle()
    fresh = world.fresh()
    fresh.settle()
    assert world.chains() == fresh.chains()
