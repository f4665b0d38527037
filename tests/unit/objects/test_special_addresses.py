"""Addresses that are nobody's to serve: at least as strict as the API server where it looks, and stricter where not."""

import json
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.objects import EndpointSlice, Kind, Service, check, decode, remark
from tests.junk import WHOLE

EVERYWHERE = [
    ("127.0.0.1", "a loopback address"),
    ("127.255.255.255", "a loopback address"),
    ("::1", "a loopback address"),
    ("0.0.0.0", "the unspecified address"),
    ("::", "the unspecified address"),
    ("224.0.0.1", "a multicast address"),
    ("239.255.255.250", "a multicast address"),
    ("ff02::1", "a multicast address"),
    ("255.255.255.255", "the broadcast address"),
]
LINK_LOCAL = ["169.254.169.254", "fe80::1", "febf::1"]
ORDINARY = [
    *("10.0.0.1", "192.168.99.10", "240.0.0.1", "223.255.255.255", "126.0.0.1", "128.0.0.1", "1.127.0.1"),
    *("2001:db8::1", "fd00::1", "fe8::1", "fec0::1", "ff::1", "::2", "::1:0", "64:ff9b::1"),
]


def decoded(kind: Kind, **changes: object) -> Service | EndpointSlice:
    """The familiar object with other values for some of its fields, or of its spec's."""
    whole = json.loads(json.dumps(WHOLE[kind]))
    for field, value in changes.items():
        (whole["spec"] if field in whole.get("spec", {}) else whole)[field] = value
    made = decode(kind, json.dumps(whole).encode())
    assert isinstance(made, Service | EndpointSlice)
    return made


def service(address: str) -> Service:
    """A Service that claims an address in every way there is."""
    status = {"loadBalancer": {"ingress": [{"ip": address}]}}
    made = decoded(
        Kind.SERVICE, clusterIP=address, clusterIPs=[address], externalIPs=[address], status=status
    )
    assert isinstance(made, Service)
    return made


@pytest.mark.parametrize(("address", "what"), EVERYWHERE)
def test_never_served(address: str, what: str) -> None:
    """Neither as cluster IP, external IP nor load balancer's; the Service itself is not refused, and a line says it."""
    it = service(address)
    assert (it.cluster_ips, it.external_ips, it.load_balancer_ips) == ((), (), ())
    assert [refused.field for refused in it.refused] == [
        "spec.clusterIPs[0]",
        "spec.externalIPs[0]",
        "status.loadBalancer.ingress[0].ip",
    ]
    assert (
        remark(it) == f"Service ns/web: spec.clusterIPs[0] is {address}, {what}: it is passed over,"
        " and so are 2 others"
    )


@pytest.mark.parametrize("address", LINK_LOCAL)
def test_link_local(address: str) -> None:
    """Refused where the API server refuses it, and served where that lets it be and a cluster may live on it."""
    it = service(address)
    assert (it.cluster_ips, it.external_ips, it.load_balancer_ips) == ((address,), (), (address,))


@pytest.mark.parametrize("address", ORDINARY)
def test_others_are_served(address: str) -> None:
    """The node's own address among them: that is how people use external IPs."""
    it = service(address)
    assert (it.cluster_ips, it.external_ips, it.load_balancer_ips) == ((address,),) * 3
    assert remark(it) == ""


def test_an_ipv4_address_in_ipv6_clothes() -> None:
    """It is taken for what it is."""
    assert service("::ffff:127.0.0.1").refused[0].address == "127.0.0.1"


@pytest.mark.parametrize("address", [it for it, _ in EVERYWHERE] + LINK_LOCAL)
def test_endpoints(address: str) -> None:
    """A slice says which of its endpoints are none: with route_localnet one of 127.0.0.1 opens the node's own ports."""
    family = "IPv6" if ":" in address else "IPv4"
    endpoints = [{"addresses": [address]}]
    it = decoded(Kind.ENDPOINT_SLICE, addressType=family, endpoints=endpoints)
    assert [refused.address for refused in it.refused] == [address]
    assert remark(it).startswith(f"EndpointSlice ns/web-1: endpoints[0].addresses[0] is {address}, ")


@given(
    st.one_of(
        st.integers(0, 2**32 - 1).map(IPv4Address),
        st.integers(0, 2**128 - 1).map(IPv6Address),
        st.integers(0, 2**118 - 1).map(lambda n: IPv6Address((0xFE80 << 112) + n)),
        st.integers(0, 2**17).map(IPv6Address),
    )
)
def test_the_kinds_are_those_of_the_standards(address: IPv4Address | IPv6Address) -> None:
    """As Python's library tells them, which knows the registries."""
    special = bool(check.special(str(address), link_local_too=True))
    assert special == (
        address.is_loopback
        or address.is_unspecified
        or address.is_link_local
        or address.is_multicast
        or address == ip_address("255.255.255.255")
    )
