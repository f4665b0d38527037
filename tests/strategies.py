"""Random objects for hypothesis, from few names and addresses so that they interact.

Strategies are made once, not for each example: making one takes longer than drawing from it.
"""

import functools
from ipaddress import IPv4Address, IPv6Address, ip_network

from hypothesis import strategies as st

from pykubeproxy.objects import (
    Deleted,
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Family,
    Key,
    Kind,
    Port,
    Protocol,
    Service,
    Updated,
)
from pykubeproxy.objects.values import RejectedValue

NODE = "node1"
ZONE = "zone-a"
NAMES = ("a", "b", "c")
INVALID_RANGE = RejectedValue("spec.loadBalancerSourceRanges[9]", "10.0.0.0/33", "not a network")
SLICES = ("s1", "s2", "s3")
PORT_NAMES = ("http", "dns")
PODS = {
    Family.IPV4: tuple(f"10.244.1.{n}" for n in range(1, 7)),
    Family.IPV6: tuple(f"fd00:10:244:1::{n}" for n in range(1, 7)),
}

ports = st.lists(
    st.builds(
        Port,
        name=st.sampled_from(PORT_NAMES),
        protocol=st.sampled_from(list(Protocol)),
        port=st.sampled_from([53, 80]),
        node_port=st.sampled_from([0, 30053, 30080]),
    ),
    min_size=1,
    max_size=2,
    # Names and numbers are unique per protocol, as the API server requires.
    unique_by=(lambda port: (port.name, port.protocol), lambda port: (port.port, port.protocol)),
).map(tuple)


def services(names: tuple[str, ...] = NAMES) -> st.SearchStrategy[Service]:
    """Services of every type and policy; no two share an address."""

    @functools.cache
    def build(name: str) -> st.SearchStrategy[Service]:
        n = names.index(name) + 1
        return st.builds(
            Service,
            namespace=st.just("ns"),
            name=st.just(name),
            type=st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]),
            cluster_ips=st.sampled_from(
                [(f"10.96.0.{n}",), (f"10.96.0.{n}", f"fd00:96::{n}"), (f"fd00:96::{n}",)]
            ),
            ports=ports,
            external_ips=st.sampled_from([(), (f"192.0.2.{n}",), (f"192.0.2.{n}", f"2001:db8::{n}")]),
            load_balancer_ips=st.sampled_from(
                [(), (f"198.51.100.{n}",), (f"198.51.100.{n}", f"2001:db8:1::{n}")]
            ),
            source_ranges=st.sampled_from(
                [
                    (),
                    ("203.0.113.0/24",),
                    ("0.0.0.0/0", "203.0.113.0/24"),
                    ("192.168.0.0/16", "2001:db8:5::/64"),
                    ("fd00:99::/64",),
                ]
            ),
            rejected=st.sampled_from([(), (INVALID_RANGE,)]),
            internal_local=st.booleans(),
            external_local=st.booleans(),
            affinity_seconds=st.sampled_from([None, 60]),
            created=st.sampled_from([0.0, 1.0]),
            health_check_node_port=st.sampled_from([0, 32000]),
        )

    return st.sampled_from(names).flatmap(build)


def endpoints(family: Family) -> st.SearchStrategy[Endpoint]:
    """Endpoints in every state, local and remote, some with hints."""
    return st.builds(
        Endpoint,
        address=st.sampled_from(PODS[family]),
        ready=st.booleans(),
        serving=st.booleans(),
        terminating=st.booleans(),
        node_name=st.sampled_from([NODE, "node2", ""]),
        zone_hints=st.sampled_from([(), (ZONE,), ("zone-b",), (ZONE, "zone-b")]),
        node_hints=st.sampled_from([(), (), (NODE,), ("node2",)]),
    )


# Like the EndpointSlice controller: each slice has all ports of its Service.
every_port = tuple(EndpointPort(name, protocol, 8080) for name in PORT_NAMES for protocol in Protocol)
some_ports = st.lists(
    st.builds(
        EndpointPort,
        name=st.sampled_from(PORT_NAMES),
        protocol=st.sampled_from(list(Protocol)),
        port=st.sampled_from([8080, 8081]),
    ),
    max_size=3,
    unique_by=lambda port: (port.name, port.protocol),
).map(tuple)


def slices(names: tuple[str, ...] = NAMES) -> st.SearchStrategy[EndpointSlice]:
    """EndpointSlices of these Services in both families."""

    @functools.cache
    def build(family: Family) -> st.SearchStrategy[EndpointSlice]:
        return st.builds(
            EndpointSlice,
            namespace=st.just("ns"),
            name=st.sampled_from(SLICES),
            service=st.sampled_from(names),
            family=st.just(family),
            endpoints=st.lists(endpoints(family), max_size=6).map(tuple),
            ports=st.one_of(st.just(every_port), some_ports),
        )

    return st.sampled_from(Family).flatmap(build)


def events() -> st.SearchStrategy[Updated | Deleted]:
    """Events that change one object each."""
    return st.one_of(
        st.builds(Updated, services()),
        st.builds(Updated, slices()),
        st.builds(Updated, slices()),
        st.builds(Deleted, st.just(Kind.SERVICE), st.builds(Key, st.just("ns"), st.sampled_from(NAMES))),
        st.builds(
            Deleted, st.just(Kind.ENDPOINT_SLICE), st.builds(Key, st.just("ns"), st.sampled_from(SLICES))
        ),
    )


def odd_addresses(family: Family) -> st.SearchStrategy[str]:
    """Random addresses, addresses at the edges of ranges, and IPv6 addresses that embed IPv4."""
    if family is Family.IPV4:
        edges = ["0.0.0.1", "10.0.0.0", "127.0.0.2", "224.0.0.1", "255.255.255.255"]
        return st.one_of(st.sampled_from(edges), st.integers(1, 2**32 - 1).map(lambda n: str(IPv4Address(n))))
    small = st.integers(1, 2**33)
    groups = st.tuples(*[st.sampled_from([0, 0, 1, 0xFFFF])] * 8).map(
        lambda parts: int.from_bytes(b"".join(part.to_bytes(2, "big") for part in parts), "big")
    )
    return st.one_of(small, groups.filter(bool), st.integers(1, 2**128 - 1)).map(
        lambda n: str(IPv6Address(n))
    )


def odd_networks(family: Family) -> st.SearchStrategy[str]:
    """Networks of any length, including /0 and single addresses."""
    longest = 32 if family is Family.IPV4 else 128
    return st.builds(
        lambda address, length: str(ip_network(f"{address}/{length}", strict=False)),
        odd_addresses(family),
        st.one_of(st.sampled_from([0, 1, longest - 1, longest]), st.integers(0, longest)),
    )
