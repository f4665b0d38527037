"""Reading what iptables-save prints: rules, policies and UDP frontends."""

import pytest

from pykubeproxy.objects import Family, Protocol
from pykubeproxy.rules.iptables_save import parse, parse_rule, without_comment
from pykubeproxy.rules.ownership import udp_frontends
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.selection import NodeTopology, ResolvedPort, resolve_ports
from tests.cases import NAMES, cluster_of, expected, load_case


def test_options() -> None:
    """Negated and quoted values and options without a value are parsed."""
    rule = parse_rule(
        '! -s 10.244.0.0/16 -d 10.96.1.1/32 -i eth+ -p tcp -m comment --comment "ns1/web:http \\"quoted\\" -j X"'
        " -m recent --rcheck --seconds 60 ! --dst-type LOCAL -m tcp --dport 80 -j KUBE-MARK-MASQ"
    )
    assert rule.options == {
        "-s": "! 10.244.0.0/16",
        "-d": "10.96.1.1/32",
        "-i": "eth+",
        "-p": "tcp",
        "-m": "tcp",
        "--comment": 'ns1/web:http "quoted" -j X',
        "--rcheck": "",
        "--seconds": "60",
        "--dst-type": "! LOCAL",
        "--dport": "80",
        "-j": "KUBE-MARK-MASQ",
    }
    assert (rule.destination, rule.port, rule.protocol, rule.target) == (
        "10.96.1.1",
        80,
        "TCP",
        "KUBE-MARK-MASQ",
    )


@pytest.mark.parametrize(
    ("text", "destination"),
    [
        ("-d fd00::1/128", "fd00::1"),
        ("-d fd00::/64", ""),
        ("! -d 10.0.0.1/32", ""),
        ("-d 10.0.0.0/255.0.255.0", ""),
        ("-j X", ""),
    ],
)
def test_destination(text: str, destination: str) -> None:
    """Only a single address counts as destination."""
    assert parse_rule(text).destination == destination


@pytest.mark.parametrize(("text", "port"), [("--dport 80", 80), ("--dport 80:90", 0), ("! --dport 80", 0)])
def test_port(text: str, port: int) -> None:
    """Only a single port counts as port."""
    assert parse_rule(f"-p tcp -m tcp {text} -j X").port == port


@pytest.mark.parametrize(
    ("text", "unconditional"),
    [
        ("-j X", True),
        ("-m statistic --mode random --probability 0.5 -j X", True),
        (
            "-p tcp -m recent --set --name X --mask 255.255.255.255 --rsource -m tcp -j DNAT --to-destination 1.2.3.4:5",
            True,
        ),
        ("-s 10.0.0.1/32 -j X", False),
        ("-m addrtype --src-type LOCAL -j X", False),
        ("-m recent --rcheck --seconds 3 --reap --name X --mask 255.255.255.255 --rsource -j X", False),
    ],
)
def test_unconditional(text: str, unconditional: bool) -> None:
    """Probability and protocol are not conditions; every other match is."""
    assert parse_rule(text).unconditional is unconditional


def test_options_with_several_values() -> None:
    """The values of one option are joined; the last of repeated options counts."""
    rule = parse_rule("-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m mark --mark 0x1 -j ACCEPT")
    assert rule.options["--tcp-flags"] == "FIN,SYN,RST,ACK SYN"
    assert rule.options["-m"] == "mark"


def test_title_is_the_service_port() -> None:
    """It is the first word of a comment with a slash in it."""
    assert parse_rule('-m comment --comment "ns1/web:http cluster IP" -j X').title == "ns1/web:http"
    assert parse_rule('-m comment --comment "kubernetes service portals" -j X').title == ""


def test_comment_is_unquoted_and_removable() -> None:
    rule = '-s 10.0.0.1/32 -m comment --comment "say \\"-j DROP\\"" -m mark --mark 0x1 -j ACCEPT'
    assert parse_rule(rule).comment == 'say "-j DROP"'
    assert without_comment(rule) == "-s 10.0.0.1/32 -m mark --mark 0x1 -j ACCEPT"
    assert parse_rule("-m comment --comment word -j ACCEPT").comment == "word"
    assert parse_rule("-j ACCEPT").comment == ""


SAVED = """*filter
:INPUT ACCEPT [1:2]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT
:MINE - [0:0]
:BARE
COMMIT
"""


def test_policies() -> None:
    """Policies other than ACCEPT are kept; other chains have none."""
    ruleset = parse(Family.IPV4, SAVED)
    assert ruleset.policies == {ChainKey("filter", "FORWARD"): "DROP"}
    assert set(ruleset.chains) == {
        ChainKey("filter", chain) for chain in ("INPUT", "FORWARD", "OUTPUT", "MINE", "BARE")
    }


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
