"""The UDP frontends in live tables."""

import pytest

from pykubeproxy.objects import Family, Protocol
from pykubeproxy.rules.dispatch import udp_frontends
from pykubeproxy.rules.ruleset import parse
from pykubeproxy.services.selection import NodeTopology, ResolvedPort, resolve_ports
from tests.cases import NAMES, cluster_of, expected, load_case


def test_all_forms_of_frontends() -> None:
    """Read cluster IPs, external IPs with and without source ranges, and node ports; ignore TCP and inner chains."""
    text = """*nat
:KUBE-SERVICES - [0:0]
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m comment --comment "kube-system/kube-dns:dns cluster IP" -m udp --dport 53 -j KUBE-SVC-A
-A KUBE-SERVICES -d 10.96.0.11/32 -p udp -m comment --comment "ns/a:b cluster IP" -m udp --dport 54 -j KUBE-SVL-A
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "ns/a:c cluster IP" -m tcp --dport 55 -j KUBE-SVC-B
-A KUBE-SERVICES -d 1.2.3.4/32 -p udp -m comment --comment "ns/a external IP" -m udp --dport 56 -j KUBE-EXT-A
-A KUBE-SERVICES -d 5.6.7.8/32 -p udp -m comment --comment "ns/a loadbalancer IP" -m udp --dport 57 -j KUBE-FW-A
-A KUBE-NODEPORTS -d 127.0.0.0/8 -p udp -m comment --comment "ns/a" -m udp --dport 30058 -m nfacct --nfacct-name x -j KUBE-EXT-A
-A KUBE-NODEPORTS -p udp -m comment --comment "ns/a" -m udp --dport 30058 -j KUBE-EXT-A
-A KUBE-SVC-A ! -s 10.0.0.0/8 -d 10.96.0.10/32 -p udp -m udp --dport 53 -j KUBE-MARK-MASQ
-A KUBE-SEP-A -p udp -m udp -j DNAT --to-destination 10.0.0.5:53
-A CNI-HOSTPORT-DNAT -p udp -m udp --dport 59 -j KUBE-SVC-A
COMMIT
"""
    assert udp_frontends(parse(Family.IPV4, text)) == {
        ("10.96.0.10", 53),
        ("10.96.0.11", 54),
        ("1.2.3.4", 56),
        ("5.6.7.8", 57),
        ("", 30058),
    }


def test_ipv6() -> None:
    """Read IPv6 addresses like IPv4 ones."""
    text = """*nat
-A KUBE-SERVICES -d fd96::a/128 -p udp -m comment --comment "ns/a:dns cluster IP" -m udp --dport 53 -j KUBE-SVC-A
COMMIT
"""
    assert udp_frontends(parse(Family.IPV6, text)) == {("fd96::a", 53)}


@pytest.mark.parametrize("name", [name for name in NAMES if "UDP" in str(load_case(name)["objects"])])
def test_rules_of_kube_proxy(name: str) -> None:
    """Read kube-proxy's rules too, for a node that takes over from it."""
    case = load_case(name)
    cluster = cluster_of(case)
    for family in Family:
        ports = [
            item
            for service in cluster.services()
            for item in resolve_ports(
                cluster, service.key, family, NodeTopology(case["node"]["metadata"]["name"])
            )
            if item.port.protocol is Protocol.UDP
        ]
        found = udp_frontends(expected(case, family))
        assert found <= {way for item in ports for way in frontends_of(item)}
        served = [item for item in ports if item.selection.cluster and not item.port.internal_local]
        assert found >= {way for item in served for way in frontends_of(item)}


def frontends_of(item: ResolvedPort) -> set[tuple[str, int]]:
    """Return the frontends of a service port by its object."""
    port = item.port
    addresses = (port.cluster_ip, *port.external_ips, *port.load_balancer_ips)
    return {(address, port.port) for address in addresses} | (
        {("", port.node_port)} if port.node_port else set()
    )
