"""A tenant's large Services change and fail anywhere: others are served at each next sync, and what a Service keeps always.

The Service `wide` is written in portions. Some of its ports always exist, with an endpoint that always exists.
"""

import itertools
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.pending import Budget
from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Deleted, EndpointPort, Event, Kind, Port, Protocol, Updated
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.digests import comparable
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from tests.fakes.iptables import FakeIptables
from tests.fakes.synced import SyncedFamily, flags_context
from tests.objects import service, slice_of
from tests.packet_model import Packet, Walker

PORTS = ("a", "b", "c", "d", "e")
LASTING, HOST = ("a", "b"), "10.244.2.1"
ADDRESSES = {"wide": "10.96.1.9", "large0": "10.96.1.0", "large1": "10.96.1.1"}
INNOCENT = "innocent"


# Four ports alone make a Service large.
BUDGET = Budget(changes=3, turn=3, portion=3, deleted=3)


@pytest.fixture(autouse=True, scope="module")
def low_thresholds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pykubeproxy.rules.service.GROUPS_ABOVE", 3)
        yield


class Judge:
    """After each block, a port that was served is served by the endpoint that it kept, and its packets go nowhere else."""

    def __init__(self) -> None:
        self.served: set[str] = set()

    def __call__(self, tables: FakeIptables) -> None:
        live = tables.save()
        walker = Walker(live)
        if skeleton.NAT_SERVICES not in live.chains:
            return
        for port in LASTING:
            number = 80 + PORTS.index(port)
            packet = Packet("10.244.9.9", ADDRESSES["wide"], "tcp", number, states=frozenset({"NEW"}))
            verdicts = {it.verdict for it in walker.walk(packet, *skeleton.NAT_SERVICES)}
            rules = live.chains.get(skeleton.FILTER_SERVICES, ())
            rejected = any(f"-d {ADDRESSES['wide']}/" in it and f"--dport {number} " in it for it in rules)
            if f"to {HOST}:8080" in verdicts and not rejected:
                self.served.add(port)
            if port in self.served:
                assert not rejected
                assert f"to {HOST}:8080" in verdicts
                assert all(it.startswith("to 10.244.2.") for it in verdicts)


def innocent(number: int, hosts: tuple[int, ...]) -> Event:
    made = slice_of(*(f"10.244.1.{host}" for host in hosts), service=f"s{number}")
    return Updated(msgspec.structs.replace(made, namespace=INNOCENT))


def innocent_services() -> list[Event]:
    """Return two Services of an innocent tenant, with an endpoint each."""
    made = [service(f"s{number}", cluster_ip=f"10.96.0.{number + 1}") for number in range(2)]
    services = [Updated(msgspec.structs.replace(it, namespace=INNOCENT)) for it in made]
    return [*services, *(innocent(number, (1,)) for number in range(2))]


def flush(node: SyncedFamily, chain: str) -> None:
    """Let another program flush a chain, and repair that."""
    if chain in node.live.tables.get("nat", {}):
        node.live.tables["nat"] = {**node.live.tables["nat"], chain: ()}
        node.repair()


def check_innocents(node: SyncedFamily, hosts: Iterator[tuple[int, ...]]) -> None:
    """Change the innocent's endpoints and sync; the rules must be right, whatever failed before."""
    node.round(*(innocent(number, next(hosts)) for number in range(2)))
    alone = Cluster()
    for made in node.cluster.services():
        if made.namespace == INNOCENT:
            alone.apply(Updated(made))
            for slice_ in node.cluster.all_slices_of(made.key):
                alone.apply(Updated(slice_))
    expected, live = render(alone, node.context), node.live.save()
    own = {key: rules for key, rules in expected.chains.items() if names.is_owned(key.chain)}
    assert {key: comparable(key, live.chains.get(key, ("none",))) for key in own} == {
        key: comparable(key, rules) for key, rules in own.items()
    }
    assert entries(live) == entries(expected)


def restart(node: SyncedFamily) -> None:
    node.restart()
    node.round()


def entries(ruleset: Ruleset) -> dict[str, list[str]]:
    """Return the rules of the innocent in chains that no service port owns."""
    shared = {key: rules for key, rules in ruleset.chains.items() if not names.is_owned(key.chain)}
    found = {str(key): [rule for rule in rules if f'"{INNOCENT}/' in rule] for key, rules in shared.items()}
    return {key: rules for key, rules in found.items() if rules}


def written(node: SyncedFamily) -> dict[ChainKey, tuple[str, ...]]:
    """Return all rules, without the comments that do not count."""
    return {key: comparable(key, rules) for key, rules in node.chains().items()}


@st.composite
def hostile_events(draw: st.DrawFn, name: str) -> list[Event]:
    """Return a new state of a large Service: ports, endpoints, addresses or affinity; all but `wide` may go."""
    lasts = name == "wide"
    ports = sorted({*(LASTING if lasts else PORTS[1:]), *draw(st.sets(st.sampled_from(PORTS)))})
    hosts = sorted({*([1] if lasts else []), *draw(st.sets(st.integers(1, 7), max_size=5))})
    made = service(
        name,
        cluster_ip=ADDRESSES[name],
        ports=tuple(Port(it, Protocol.TCP, 80 + PORTS.index(it)) for it in ports),
        external_ips=draw(st.sampled_from([(), ("192.0.2.1",), ("192.0.2.1", "192.0.2.2")])),
        affinity_seconds=draw(st.sampled_from([None, None, 60])),
        proxy_name=draw(st.sampled_from([None, None, None, None if lasts else "other"])),
    )
    targets = tuple(EndpointPort(it, Protocol.TCP, 8080) for it in ports)
    made_slice = slice_of(*(f"10.244.2.{host}" for host in hosts), service=name, ports=targets)
    changes: list[list[Event]] = [
        [Updated(made), Updated(made_slice)],
        [Updated(made)],
        [Updated(made_slice)],
    ]
    return draw(st.sampled_from(changes if lasts else [*changes, [Deleted(Kind.SERVICE, made.key)]]))


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
WORK = st.sampled_from(
    [SyncedFamily.round, SyncedFamily.turn_if_due, SyncedFamily.turn_if_due, SyncedFamily.lose_if_due]
)


def steps(*tenants: str) -> st.SearchStrategy[list[Callable[[SyncedFamily], object]]]:
    """Return steps in which these Services change, and something fails."""
    changes = st.sampled_from(tenants).flatmap(hostile_events)
    return st.lists(
        st.one_of(
            st.builds(lambda it: lambda node: node.apply(*it), changes),
            st.builds(lambda it: lambda node: (node.round(*it), node.turn_if_due()), changes),
            st.builds(lambda n, work: lambda node: node.fail_after(n, work), st.integers(0, 9), WORK),
            st.builds(lambda it: lambda node: setattr(node, "broken", it), BROKEN),
            st.builds(lambda it: lambda node: flush(node, it), BROKEN),
            st.one_of(WORK, st.just(restart)),
        ),
        min_size=1,
        max_size=14,
    )


@pytest.mark.parametrize(("tenants", "port_pairs"), [(("wide",), 2), (("large0", "large1"), 1)])
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 3, 200]),
)
def test_large_services_harm_neither_others_nor_what_they_keep(
    tenants: tuple[str, ...],
    port_pairs: int,
    data: st.DataObject,
    backend: Backend,
    chains_per_block: int | None,
) -> None:
    first, budget = data.draw(hostile_events(tenants[0])), BUDGET._replace(portion=port_pairs)
    check(first, data.draw(steps(*tenants)), backend, chains_per_block, budget)


def check(
    first: list[Event],
    steps: list[Callable[[SyncedFamily], object]],
    backend: Backend,
    chains_per_block: int | None,
    budget: Budget,
) -> None:
    judge, hosts = Judge(), itertools.cycle([(), (1,), (2, 3)])
    context = flags_context(cluster_cidr="10.244.0.0/16")
    node = SyncedFamily(
        context=context, backend=backend, chains_per_block=chains_per_block, after_block=judge, budget=budget
    )
    node.write_block_by_block()
    node.round(*innocent_services())
    node.round(*first)
    node.settle(200)
    for step in steps:
        step(node)
        node.check_known()
        check_innocents(node, hosts)
    node.broken = ""
    node.settle(200)
    fresh = node.fresh()
    fresh.settle(200)
    assert written(node) == written(fresh)
    judge.served.clear()
    for name in ADDRESSES:
        node.apply(Deleted(Kind.SERVICE, service(name).key))
    node.settle(200)
    assert {key.namespace for key in node.tables.services()} == {INNOCENT}
