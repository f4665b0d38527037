"""Rules of random objects and settings are accepted and read back byte for byte."""

from ipaddress import ip_address

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.config import Dispatch
from pykubeproxy.kernel import Backend, Iptables, Runner, nfacct, open_iptables
from pykubeproxy.objects import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Family,
    Kind,
    Listed,
    Port,
    Protocol,
    Service,
)
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.dispatch import node_port_jumps
from pykubeproxy.rules.options import LocalTraffic, RuleOptions
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.selection import NodeTopology
from tests.strategies import NODE, odd_addresses, odd_networks

LONG = "x" * 63
port_numbers = st.one_of(st.sampled_from([1, 80, 65535]), st.integers(1, 65535))


def names() -> st.SearchStrategy[str]:
    return st.sampled_from(["a", "a-b", "0", LONG])


def worlds(family: Family) -> st.SearchStrategy[tuple[Service, EndpointSlice]]:
    """A Service with unusual addresses and numbers, and its EndpointSlice."""
    address, network = odd_addresses(family), odd_networks(family)
    some_addresses = st.lists(address, max_size=2, unique=True).map(tuple)
    service = st.builds(
        Service,
        namespace=names(),
        name=names(),
        type=st.just("LoadBalancer"),
        cluster_ips=st.tuples(address),
        ports=st.tuples(
            st.builds(Port, names() | st.just(""), st.sampled_from(Protocol), port_numbers, port_numbers)
        ),
        external_ips=some_addresses,
        load_balancer_ips=some_addresses,
        source_ranges=st.lists(network, max_size=3).map(tuple),
        internal_local=st.booleans(),
        external_local=st.booleans(),
        affinity_seconds=st.sampled_from([None, 1, 10800, 86400]),
        health_check_node_port=port_numbers,
    )
    endpoints = st.lists(
        st.builds(Endpoint, address, ready=st.booleans(), node_name=st.sampled_from([NODE, "node2"])),
        max_size=4,
    ).map(tuple)
    return st.tuples(service, endpoints, port_numbers).map(
        lambda drawn: (
            drawn[0],
            EndpointSlice(
                drawn[0].namespace,
                "s",
                drawn[0].name,
                family,
                drawn[1],
                (EndpointPort(drawn[0].ports[0].name, drawn[0].ports[0].protocol, drawn[2]),),
            ),
        )
    )


def odd_contexts(family: Family) -> st.SearchStrategy[RuleContext]:
    """Rule contexts with any mark, detect mode and node port addresses."""
    options = st.builds(
        RuleOptions,
        family=st.just(family),
        masquerade_bit=st.integers(0, 31),
        masquerade_all=st.booleans(),
        local_traffic=st.one_of(
            st.none(),
            st.builds(LocalTraffic, source=odd_networks(family)),
            st.builds(LocalTraffic, interface=st.sampled_from(["cbr0", "veth+", "a.b-c_d", "x" * 14 + "+"])),
        ),
        localhost_node_ports=st.booleans(),
        node_ip=odd_addresses(family),
        random_fully=st.booleans(),
        drop_invalid=st.booleans(),
        dispatch=st.sampled_from([Dispatch.FLAT, Dispatch.TREE]),
        large_cluster=st.booleans(),
    )
    networks = st.lists(odd_networks(family), max_size=2).map(tuple)
    addresses = st.lists(odd_addresses(family), max_size=3).map(tuple)
    return st.tuples(options, networks, addresses).map(
        lambda drawn: RuleContext(NodeTopology(NODE), drawn[0], node_port_jumps(drawn[1], drawn[2], drawn[0]))
    )


def cluster_of(service: Service, slice_: EndpointSlice) -> Cluster:
    cluster = Cluster()
    cluster.apply(Listed(Kind.SERVICE, (service,)))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, (slice_,)))
    return cluster


def ours(live: Ruleset, rendered: Ruleset) -> dict[object, object]:
    return {key: live.chains.get(key) for key in rendered.chains}


@pytest.mark.root
@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("family", Family)
def test_random_rules_read_back(backend: Backend, family: Family, runner: Runner, inside: str) -> None:
    """A second sync has nothing to write."""
    for name in skeleton.NFACCT_NAMES:
        assert nfacct.ensure(name) == ""
    iptables = open_iptables(backend, family, runner)

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(worlds(family), odd_contexts(family))
    def sync_random_world(world: tuple[Service, EndpointSlice], rules_context: RuleContext) -> None:
        cluster = cluster_of(*world)
        rendered = render(cluster, rules_context)
        # Each example starts from the tables of the previous one.
        FamilyTables(iptables, 3).sync(cluster, rules_context)
        assert ours(iptables.save(), rendered) == rendered.chains
        assert not FamilyTables(iptables, 3).sync(cluster, rules_context).wrote

    sync_random_world()


@pytest.mark.root
@pytest.mark.parametrize("count", [2, 3, 7, 300, 1001])
def test_any_number_of_endpoints_reads_back(iptables: Iptables, inside: str, count: int) -> None:
    """With affinity and the longest names."""
    for name in skeleton.NFACCT_NAMES:
        assert nfacct.ensure(name) == ""
    first = ip_address(
        "10.0.0.1" if iptables.family is Family.IPV4 else "ffff:ffff:ffff:ffff:ffff:ffff:1111:1111"
    )
    service = Service(
        LONG,
        LONG,
        "LoadBalancer",
        (str(first - 1),),
        (Port(LONG, Protocol.SCTP, 65535, 65535),),
        external_local=True,
        load_balancer_ips=(str(first - 2),),
        source_ranges=(f"{first}/{first.max_prefixlen}",),
        affinity_seconds=86400,
        health_check_node_port=65535,
    )
    slice_ = EndpointSlice(
        LONG,
        "s",
        LONG,
        iptables.family,
        tuple(Endpoint(str(first + n), node_name=NODE) for n in range(count)),
        (EndpointPort(LONG, Protocol.SCTP, 65535),),
    )
    rules_context = RuleContext(NodeTopology(NODE), RuleOptions(iptables.family), ())
    cluster = cluster_of(service, slice_)
    FamilyTables(iptables, 200).sync(cluster, rules_context)
    rendered = render(cluster, rules_context)
    assert ours(iptables.save(), rendered) == rendered.chains
    assert not FamilyTables(iptables, 200).sync(cluster, rules_context).wrote
