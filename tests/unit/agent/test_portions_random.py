"""A Service that is written in portions keeps serving its endpoints after each block, whatever fails in between."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.agent import coverage
from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Deleted, EndpointPort, Event, Key, Kind, Port, Protocol, Updated
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.digests import comparable
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.iptables import FakeIptables
from tests.fakes.synced import SyncedFamily
from tests.objects import service, slice_of
from tests.packet_model import Packet, Walker
from tests.unit.rules.test_partial_syncs import context

CONTEXT = context((), False, "auto")
ADDRESS, EXTERNAL = "10.96.1.1", "192.0.2.1"
PORTS = {"a": 80, "b": 81, "c": 82, "d": 83}
# Ports that always exist, and a host that is always an endpoint of them.
LASTING, HOST = ("a", "b"), "10.244.2.1"


@pytest.fixture(autouse=True, scope="module")
def low_thresholds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "LARGE_PAIRS", 3)
        patch.setattr(coverage, "LEGACY_FACTOR", 1)
        patch.setattr(coverage, "PORT_PAIRS", 2)
        patch.setattr(coverage, "MOST_DELETED", 3)
        patch.setattr(coverage, "_FEW_ENDPOINTS", 0)
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


def rules(node: SyncedFamily) -> dict[ChainKey, tuple[str, ...]]:
    """Return all rules, without the comments that do not count."""
    return {key: comparable(key, found) for key, found in node.chains().items()}


def restart(node: SyncedFamily) -> None:
    node.restart()
    node.round()


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


WORK = st.sampled_from(
    [SyncedFamily.round, SyncedFamily.turn_if_due, SyncedFamily.turn_if_due, SyncedFamily.lose_if_due]
)
STEPS = st.one_of(
    st.builds(lambda it: lambda node: node.round(*it), changes()),
    st.builds(lambda n, work: lambda node: node.fail_after(n, work), st.integers(0, 9), WORK),
    st.one_of(WORK, st.just(SyncedFamily.turn_if_due), st.just(restart)),
)


@settings(max_examples=150, deadline=None)
@given(
    first=changes(),
    steps=st.lists(STEPS, min_size=1, max_size=16),
    backend=st.sampled_from(Backend),
    chains_per_block=st.sampled_from([None, 1, 3, 200]),
)
def test_a_service_in_portions_serves_the_endpoints_that_it_keeps(
    first: list[Event],
    steps: list[Callable[[SyncedFamily], object]],
    backend: Backend,
    chains_per_block: int | None,
) -> None:
    judge = Judge()
    node = SyncedFamily(
        context=CONTEXT, backend=backend, chains_per_block=chains_per_block, after_block=judge
    )
    node.write_block_by_block()
    node.round()
    node.round(*first)
    node.settle(200)
    for step in steps:
        step(node)
    node.settle(200)
    fresh = node.fresh()
    fresh.settle(200)
    assert rules(node) == rules(fresh)
    judge.served.clear()
    node.apply(Deleted(Kind.SERVICE, Key("ns", "wide")))
    node.settle(200)
    assert not node.tables.services()
