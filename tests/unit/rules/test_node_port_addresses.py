"""Rules and flow cleaning agree on the addresses that serve node ports."""

import ipaddress

import pytest

from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.dispatch import node_port_jumps
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.text import host
from pykubeproxy.services.flows import NodePortAddresses

LOCAL = {
    Family.IPV4: ("127.0.0.1", "10.0.0.7", "192.168.0.1"),
    Family.IPV6: ("::1", "fd00::7", "2001:db8::1"),
}


@pytest.mark.parametrize(
    "networks_text",
    [
        "10.0.0.0/8",
        "10.0.0.7/32",
        "127.0.0.0/8",
        "127.0.0.0/8,192.168.0.0/24",
        "172.16.0.0/12",
        "fd00::/64",
        "::1/128",
        "2001:db8::/32,fd00::7/128",
    ],
)
@pytest.mark.parametrize("localhost", [True, False])
def test_same_addresses(networks_text: str, localhost: bool) -> None:
    """For every list of networks, with and without localhostNodePorts."""
    networks = tuple(networks_text.split(","))
    family = family_of(networks[0])
    options = RuleOptions(family, localhost_node_ports=localhost)
    jumps = node_port_jumps(networks, LOCAL[family], options)
    at = NodePortAddresses(networks, loopback=localhost and family is Family.IPV4)
    for address in LOCAL[family]:
        ruled = any(f"-d {host(address)} " in jump for jump in jumps)
        assert at.include(ipaddress.ip_address(address).packed) is ruled, address


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("localhost", [True, False])
def test_everywhere(family: Family, localhost: bool) -> None:
    """Without networks, all addresses serve node ports, except loopback where it cannot."""
    (jump,) = node_port_jumps((), (), RuleOptions(family, localhost_node_ports=localhost))
    loopback, *others = LOCAL[family]
    at = NodePortAddresses((), loopback=localhost and family is Family.IPV4)
    assert at.include(ipaddress.ip_address(loopback).packed) is ("! -d" not in jump)
    assert all(at.include(ipaddress.ip_address(address).packed) for address in others)
