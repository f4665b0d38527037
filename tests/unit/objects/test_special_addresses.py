"""Addresses that are never served, by rules at least as strict as those of the API server."""

import json
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.objects import EndpointSlice, Kind, Service, check, decode, rejection_warning
from tests.invalid_objects import WHOLE

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
    """Return the valid object with other values for some fields of it or its spec."""
    whole = json.loads(json.dumps(WHOLE[kind]))
    for field, value in changes.items():
        (whole["spec"] if field in whole.get("spec", {}) else whole)[field] = value
    made = decode(kind, json.dumps(whole).encode())
    assert isinstance(made, Service | EndpointSlice)
    return made


def service(address: str) -> Service:
    """Return a Service with an address as cluster IP, external IP and load balancer IP."""
    status = {"loadBalancer": {"ingress": [{"ip": address}]}}
    made = decoded(
        Kind.SERVICE, clusterIP=address, clusterIPs=[address], externalIPs=[address], status=status
    )
    assert isinstance(made, Service)
    return made


@pytest.mark.parametrize(("address", "what"), EVERYWHERE)
def test_never_served(address: str, what: str) -> None:
    """The address is left out of all fields with a warning; the Service itself is accepted."""
    it = service(address)
    assert (it.cluster_ips, it.external_ips, it.load_balancer_ips) == ((), (), ())
    assert [rejected.field for rejected in it.rejected] == [
        "spec.clusterIPs[0]",
        "spec.externalIPs[0]",
        "status.loadBalancer.ingress[0].ip",
    ]
    assert (
        rejection_warning(it)
        == f"Service ns/web: spec.clusterIPs[0] is '{address}', {what}: it is skipped, and 2 more"
    )


@pytest.mark.parametrize("address", LINK_LOCAL)
def test_link_local(address: str) -> None:
    """Link-local addresses are rejected only as external IPs, as by the API server."""
    it = service(address)
    assert (it.cluster_ips, it.external_ips, it.load_balancer_ips) == ((address,), (), (address,))


@pytest.mark.parametrize("address", ORDINARY)
def test_other_addresses_are_served(address: str) -> None:
    """Other addresses are served, including those of the node."""
    it = service(address)
    assert (it.cluster_ips, it.external_ips, it.load_balancer_ips) == ((address,),) * 3
    assert rejection_warning(it) == ""


def test_ipv4_mapped_address() -> None:
    assert service("::ffff:127.0.0.1").rejected[0].value == "127.0.0.1"


@pytest.mark.parametrize("address", [it for it, _ in EVERYWHERE] + LINK_LOCAL)
def test_endpoints(address: str) -> None:
    """Endpoints are rejected too: with route_localnet, 127.0.0.1 would expose ports of the node."""
    family = "IPv6" if ":" in address else "IPv4"
    endpoints = [{"addresses": [address]}]
    it = decoded(Kind.ENDPOINT_SLICE, addressType=family, endpoints=endpoints)
    assert [rejected.value for rejected in it.rejected] == [address]
    assert isinstance(it, EndpointSlice)
    assert it.endpoints == ()
    warning = f"EndpointSlice ns/web-1: endpoints[0].addresses[0] is '{address}', "
    assert rejection_warning(it).startswith(warning)


@given(
    st.one_of(
        st.integers(0, 2**32 - 1).map(IPv4Address),
        st.integers(0, 2**128 - 1).map(IPv6Address),
        st.integers(0, 2**118 - 1).map(lambda n: IPv6Address((0xFE80 << 112) + n)),
        st.integers(0, 2**17).map(IPv6Address),
    )
)
def test_special_addresses_match_ipaddress(address: IPv4Address | IPv6Address) -> None:
    try:
        check.servable(str(address), "it", reject_link_local=True)
        special = False
    except check.Invalid:
        special = True
    assert special == (
        address.is_loopback
        or address.is_unspecified
        or address.is_link_local
        or address.is_multicast
        or address == ip_address("255.255.255.255")
    )
