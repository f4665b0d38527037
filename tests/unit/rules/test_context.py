"""The rule context of a configuration, a node and kernel facts, and the addresses that serve node ports."""

import ipaddress
from typing import Any

import pytest

from pykubeproxy.config import Config, load
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import (
    KernelFacts,
    RuleContext,
    missing_network,
    node_ips,
    primary_family,
    rule_context,
)
from pykubeproxy.rules.dispatch import node_port_jumps
from pykubeproxy.rules.options import LocalTraffic, RuleOptions
from pykubeproxy.rules.text import host
from pykubeproxy.services.flows import NodePortAddresses
from tests.settings import HEADER
from tests.strategies import NODE

ADDRESSES = ("127.0.0.1", "127.0.0.53", "192.168.99.10", "10.244.1.1", "::1", "fd00:99::10", "fe80::1")
BOTH = Node(NODE, ("192.168.99.10", "fd00:99::10"), ("10.244.1.0/24", "fd00:10:244:1::/64"), "zone-a")
ONLY_4 = Node(NODE, ("192.168.99.10",), ("10.244.1.0/24",))
ONLY_6 = Node(NODE, ("fd00:99::10",))
EVERYWHERE_4 = ["-m addrtype --dst-type LOCAL"]
NOT_LOOPBACK = ["! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL"]
EVERYWHERE_6 = ["! -d ::1/128 -m addrtype --dst-type LOCAL"]


def config(**fields: object) -> Config:
    return load({**HEADER, **fields}, {}).config


def context(family: Family, node: Node | None = BOTH, **fields: object) -> RuleContext:
    return rule_context(config(**fields), NODE, node, KernelFacts(ADDRESSES), family)


def jumps(rules_context: RuleContext) -> list[str]:
    """Return the matches of the jumps to the node ports, without comment and target."""
    comment = (
        '-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" '
    )
    return [
        jump.replace(comment, "").removesuffix(" -j KUBE-NODEPORTS") for jump in rules_context.node_port_jumps
    ]


@pytest.mark.parametrize(
    ("node_port_addresses", "four", "six", "loopback"),
    [
        ([], EVERYWHERE_4, EVERYWHERE_6, True),
        (["0.0.0.0/0", "10.244.0.0/16"], EVERYWHERE_4, EVERYWHERE_6, True),
        (["192.168.99.77/24"], ["-d 192.168.99.10/32"], EVERYWHERE_6, False),
        (["127.0.0.0/8"], ["-d 127.0.0.1/32", "-d 127.0.0.53/32"], EVERYWHERE_6, True),
        (["127.0.0.1/32", "10.0.0.0/8"], ["-d 10.244.1.1/32", "-d 127.0.0.1/32"], EVERYWHERE_6, True),
        (["126.0.0.0/7"], ["-d 127.0.0.1/32", "-d 127.0.0.53/32"], EVERYWHERE_6, True),
        (["fd00:99::/64"], EVERYWHERE_4, ["-d fd00:99::10/128"], True),
        (["::1/128"], EVERYWHERE_4, [], True),
        (["172.16.0.0/12"], [], EVERYWHERE_6, False),
        (["primary"], ["-d 192.168.99.10/32"], ["-d fd00:99::10/128"], False),
        (["primary", "fd00:99::/64"], ["-d 192.168.99.10/32"], ["-d fd00:99::10/128"], False),
        (
            ["primary", "localhost"],
            ["-d 127.0.0.1/32", "-d 127.0.0.53/32", "-d 192.168.99.10/32"],
            ["-d fd00:99::10/128"],
            True,
        ),
        (["localhost"], ["-d 127.0.0.1/32", "-d 127.0.0.53/32"], [], True),
        (["all"], EVERYWHERE_4, EVERYWHERE_6, True),
        (["primary", "all"], EVERYWHERE_4, EVERYWHERE_6, True),
    ],
)
def test_node_port_addresses_select_addresses_of_the_node(
    node_port_addresses: list[str], four: list[str], six: list[str], loopback: bool
) -> None:
    """One rule per matching address; a family without networks in the list serves all."""
    rules_context = context(Family.IPV4, nodePortAddresses=node_port_addresses)
    assert jumps(rules_context) == four
    assert rules_context.options.localhost_node_ports is loopback
    assert bool(skeleton.kubelet_firewall(rules_context.options)) is loopback
    assert jumps(context(Family.IPV6, nodePortAddresses=node_port_addresses)) == six


@pytest.mark.parametrize(
    ("node", "four", "six"),
    [
        (ONLY_4, ["-d 192.168.99.10/32"], EVERYWHERE_6),
        (ONLY_6, EVERYWHERE_4, ["-d fd00:99::10/128"]),
        (None, EVERYWHERE_4, EVERYWHERE_6),
    ],
)
def test_primary_without_an_address_of_the_family_serves_all(
    node: Node | None, four: list[str], six: list[str]
) -> None:
    assert jumps(context(Family.IPV4, node, nodePortAddresses=["primary"])) == four
    assert jumps(context(Family.IPV6, node, nodePortAddresses=["primary"])) == six


def test_without_localhost_node_ports_loopback_is_excluded() -> None:
    """Also if nodePortAddresses lists it."""
    off: dict[str, Any] = {"iptables": {"localhostNodePorts": False}}
    assert jumps(context(Family.IPV4, **off)) == NOT_LOOPBACK
    assert jumps(context(Family.IPV4, nodePortAddresses=["127.0.0.0/8"], **off)) == []
    assert skeleton.kubelet_firewall(context(Family.IPV4, **off).options) == ()
    assert skeleton.kubelet_firewall(context(Family.IPV6).options) == ()


@pytest.mark.parametrize(
    ("bind", "four", "six", "primary"),
    [
        ("0.0.0.0", "192.168.99.10", "fd00:99::10", Family.IPV4),
        ("::", "192.168.99.10", "fd00:99::10", Family.IPV4),
        ("10.9.8.7", "10.9.8.7", "fd00:99::10", Family.IPV4),
        ("fd00:9::8", "192.168.99.10", "fd00:9::8", Family.IPV6),
        ("127.0.0.1", "127.0.0.1", "fd00:99::10", Family.IPV4),
    ],
)
def test_bind_address_overrides_the_node_address(bind: str, four: str, six: str, primary: Family) -> None:
    """Only in its own family, and not if it is unspecified."""
    rules_context = config(bindAddress=bind)
    assert node_ips(rules_context, BOTH) == {Family.IPV4: four, Family.IPV6: six}
    assert primary_family(rules_context, BOTH) is primary


def test_node_ips_default_to_loopback() -> None:
    """Otherwise the node's first address of each family counts."""
    assert node_ips(config(), None) == {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}
    several = Node(NODE, ("fd00::1", "10.0.0.1", "10.0.0.2", "fd00::2"))
    assert node_ips(config(), several) == {Family.IPV4: "10.0.0.1", Family.IPV6: "fd00::1"}
    assert primary_family(config(), several) is Family.IPV6


@pytest.mark.parametrize(
    ("fields", "four", "six"),
    [
        ({}, None, None),
        ({"clusterCIDR": "10.244.0.9/16"}, LocalTraffic("10.244.0.0/16"), None),
        ({"clusterCIDR": "fd00::/56,10.0.0.0/8"}, LocalTraffic("10.0.0.0/8"), LocalTraffic("fd00::/56")),
        ({"detectLocalMode": "NodeCIDR"}, LocalTraffic("10.244.1.0/24"), None),
        (
            {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "veth"}},
            LocalTraffic(interface="veth+"),
            LocalTraffic(interface="veth+"),
        ),
        (
            {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cbr0"}},
            LocalTraffic(interface="cbr0"),
            LocalTraffic(interface="cbr0"),
        ),
    ],
)
def test_local_traffic_follows_the_detect_mode(
    fields: dict[str, object], four: LocalTraffic | None, six: LocalTraffic | None
) -> None:
    """Each family uses its own network."""
    assert context(Family.IPV4, ONLY_4, **fields).options.local_traffic == four
    assert context(Family.IPV6, ONLY_4, **fields).options.local_traffic == six


@pytest.mark.parametrize(
    ("bit", "mark"), [(0, "0x1/0x1"), (14, "0x4000/0x4000"), (31, "0x80000000/0x80000000")]
)
def test_masquerade_mark_has_iptables_save_format(bit: int, mark: str) -> None:
    assert context(Family.IPV4, iptables={"masqueradeBit": bit}).options.mark == mark


def test_kernel_facts_select_rules() -> None:
    """Liberal TCP tracking admits INVALID packets; without nfacct there are no counters."""
    kernel = KernelFacts(ADDRESSES, random_fully=False, nfacct=False, tcp_be_liberal=True)
    rules_context = rule_context(config(), NODE, BOTH, kernel, Family.IPV4)
    text = str(skeleton.fixed_chains(rules_context.options))
    assert "INVALID" not in text
    assert "nfacct" not in text
    assert "--random-fully" not in text


@pytest.mark.parametrize(
    ("node", "fields", "refused"),
    [
        (ONLY_4, {"clusterCIDR": "fd00:10::/48"}, True),
        (ONLY_4, {"clusterCIDR": "fd00:10::/48,10.244.0.0/16"}, False),
        (ONLY_4, {"clusterCIDR": ""}, False),
        (ONLY_6, {"clusterCIDR": "fd00:10::/48"}, False),
        (ONLY_6, {"clusterCIDR": "10.244.0.0/16"}, True),
        (None, {"clusterCIDR": "fd00:10::/48"}, True),
        (None, {"clusterCIDR": "fd00:10::/48", "bindAddress": "::1"}, False),
        (BOTH, {"detectLocalMode": "NodeCIDR", "clusterCIDR": "fd00:10::/48"}, False),
    ],
)
def test_a_cluster_cidr_of_the_other_family_needs_both_families(
    node: Node | None, fields: dict[str, object], refused: bool
) -> None:
    """As in kube-proxy: only where one family is not supported."""
    reason = missing_network(config(**fields), node, {Family.IPV6: "no ip6tables"})
    assert bool(reason) is refused
    assert missing_network(config(**fields), node, {}) == ""


def test_pod_cidrs_of_the_other_family_are_refused() -> None:
    """As in kube-proxy, even if both families are supported."""
    node = Node(NODE, ("192.168.99.10",), ("fd00:10:244:1::/64",))
    assert missing_network(config(detectLocalMode="NodeCIDR"), node, {})
    assert not missing_network(config(clusterCIDR="10.244.0.0/16"), node, {})


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
