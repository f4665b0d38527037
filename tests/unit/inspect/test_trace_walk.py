"""Trace packets through small rulesets: table order, jumps, policies and probabilities."""

import pytest

from pykubeproxy.inspect.dump.model import PacketVerdict
from pykubeproxy.inspect.packets.packet import NodeNetwork, NodeRoute, Packet
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import parse
from tests.traces import PacketTrace, trace_packet

HOST = NodeNetwork(
    frozenset({"192.168.99.10"}),
    (NodeRoute("0.0.0.0/0", "eth0"), NodeRoute("10.244.1.0/24", "cni0"), NodeRoute("10.244.9.0/24", "")),
)
COMING = Packet("tcp", "203.0.113.9", "10.96.0.10", 80)
TO_NODE = Packet("tcp", "203.0.113.9", "192.168.99.10", 30080)
LEAVING = Packet("tcp", "192.168.99.10", "10.96.0.10", 80, starts_here=True)


def traced(rules: str, packet: Packet = COMING) -> PacketTrace:
    """Trace through rules given as lines "table CHAIN rule" or "table :CHAIN POLICY"."""
    text: dict[str, list[str]] = {}
    for line in rules.strip().splitlines():
        table, rest = line.strip().split(" ", 1)
        text.setdefault(table, []).append(rest if rest.startswith(":") else f"-A {rest}")
    saved = "".join(f"*{table}\n" + "\n".join(lines) + "\nCOMMIT\n" for table, lines in text.items())
    return trace_packet(parse(Family.IPV4, saved), packet, HOST)


def path_of(trace: PacketTrace) -> list[str]:
    return [f"{step.table} {step.chain}" for step in trace.steps if step.matched]


EVERYWHERE = "\n".join(
    f"{table} {chain} -m comment --comment here"
    for table in ("security", "nat", "filter", "mangle", "raw")
    for chain in ("POSTROUTING", "FORWARD", "INPUT", "OUTPUT", "PREROUTING")
)


@pytest.mark.parametrize(
    ("packet", "points"),
    [
        (
            COMING,
            (
                "raw PREROUTING, mangle PREROUTING, nat PREROUTING, mangle FORWARD, filter FORWARD, security FORWARD, "
                "mangle POSTROUTING, nat POSTROUTING"
            ),
        ),
        (
            TO_NODE,
            "raw PREROUTING, mangle PREROUTING, nat PREROUTING, mangle INPUT, filter INPUT, security INPUT, nat INPUT",
        ),
        (
            LEAVING,
            (
                "raw OUTPUT, mangle OUTPUT, nat OUTPUT, filter OUTPUT, security OUTPUT, "
                "mangle POSTROUTING, nat POSTROUTING"
            ),
        ),
        (
            Packet("tcp", "127.0.0.1", "127.0.0.1", 80, starts_here=True),
            (
                "raw OUTPUT, mangle OUTPUT, nat OUTPUT, filter OUTPUT, security OUTPUT, "
                "mangle POSTROUTING, nat POSTROUTING, raw PREROUTING, mangle PREROUTING, "
                "mangle INPUT, filter INPUT, security INPUT"
            ),
        ),
    ],
    ids=["forwarded", "for the node", "from the node", "from the node to itself"],
)
def test_tables_are_traversed_in_the_kernels_order(packet: Packet, points: str) -> None:
    """Local packets are received again but not translated again."""
    trace = traced(EVERYWHERE, packet)
    assert ", ".join(path_of(trace)) == points
    assert trace.verdict is PacketVerdict.PASS


def test_filter_and_routing_use_the_endpoint_after_dnat() -> None:
    trace = traced(
        """
        nat PREROUTING -d 10.96.0.10/32 -j DNAT --to-destination 192.168.99.10:8080
        filter FORWARD -j DROP
        filter INPUT -d 10.96.0.10/32 -j DROP
        filter INPUT -d 192.168.99.10/32 -p tcp -m tcp --dport 8080 -m conntrack --ctstate DNAT -j REJECT
        """
    )
    assert trace.verdict is PacketVerdict.REJECT
    assert path_of(trace) == ["nat PREROUTING", "filter INPUT"]
    assert trace.endpoints == ()


def test_return_and_goto_continue_after_the_caller() -> None:
    """A chain entered by goto returns to its caller's caller."""
    trace = traced(
        """
        filter FORWARD -j OUTER
        filter FORWARD -m comment --comment after -j ACCEPT
        filter OUTER -g INNER
        filter OUTER -j DROP
        filter INNER -p tcp -j RETURN
        filter INNER -j DROP
        """
    )
    assert trace.verdict is PacketVerdict.PASS
    assert path_of(trace) == ["filter FORWARD", "filter OUTER", "filter INNER", "filter FORWARD"]


def test_a_random_return_splits_the_packets() -> None:
    trace = traced(
        """
        filter FORWARD -j HALF
        filter FORWARD -j REJECT --reject-with icmp-port-unreachable
        filter HALF -m statistic --mode random --probability 0.50000000000 -j RETURN
        filter HALF -j ACCEPT
        """
    )
    assert [(it.verdict, it.probability) for it in trace.rejections] == [(PacketVerdict.REJECT, 0.5)]


def test_the_chain_policy_is_a_step() -> None:
    """It applies if no rule decides."""
    trace = traced("filter :FORWARD DROP [0:0]\nfilter FORWARD -p udp -j ACCEPT")
    assert trace.verdict is PacketVerdict.DROP
    assert trace.steps[-1].rule == "policy DROP"
    assert trace.rejections[0].step == trace.steps[-1]
    assert traced("filter :FORWARD DROP [0:0]\nfilter FORWARD -p tcp -j ACCEPT").verdict is PacketVerdict.PASS


def test_untracked_packets_skip_nat() -> None:
    """As NodeLocal DNSCache requires."""
    trace = traced(
        """
        raw PREROUTING -d 10.96.0.10/32 -j CT --notrack
        nat PREROUTING -j DNAT --to-destination 10.244.1.1:80
        filter FORWARD -m conntrack --ctstate NEW -j DROP
        filter FORWARD -m conntrack --ctstate UNTRACKED -j ACCEPT
        nat POSTROUTING -j MASQUERADE
        """
    )
    assert trace.verdict is PacketVerdict.PASS
    assert not trace.masquerade


def test_common_steps_of_endpoints_are_listed_once() -> None:
    trace = traced(
        """
        nat PREROUTING -m statistic --mode random --probability 0.50000000000 -j DNAT --to-destination 10.244.1.1:80
        nat PREROUTING -m comment --comment last -j DNAT --to-destination 10.244.1.2:80
        filter FORWARD -d 10.244.1.2/32 -j DROP
        filter FORWARD -m comment --comment all -j ACCEPT
        """
    )
    assert [step.reason for step in trace.steps if step.table == "filter"] == [
        "to 10.244.1.1:80: every packet matches",
        "to 10.244.1.2:80: its destination is 10.244.1.2",
    ]
    assert trace.verdict is PacketVerdict.DNAT
    assert [(it.verdict, it.probability) for it in trace.rejections] == [(PacketVerdict.DROP, 0.5)]


def test_irrelevant_rules_are_left_out() -> None:
    trace = traced(
        """
        nat PREROUTING -d 10.96.0.11/32 -j DNAT --to-destination 10.244.1.1:80
        nat PREROUTING -s 10.0.0.0/8 -d 10.96.0.10/32 -j DNAT --to-destination 10.244.1.2:80
        """
    )
    assert [(step.rule.split()[1], step.matched) for step in trace.steps] == [("10.0.0.0/8", False)]


@pytest.mark.parametrize(
    ("rule", "packet", "verdict"),
    [
        (
            "filter FORWARD -i eth0 -o cni0 -j DROP",
            Packet("tcp", "203.0.113.9", "10.244.1.1", 80),
            PacketVerdict.DROP,
        ),
        (
            "filter FORWARD -i cni0 -o eth0 -j DROP",
            Packet("tcp", "10.244.1.1", "1.1.1.1", 80),
            PacketVerdict.DROP,
        ),
        ("filter FORWARD -i cni0 -j DROP", COMING, PacketVerdict.PASS),
        (
            "filter FORWARD -i cni0 -j DROP",
            Packet("tcp", "203.0.113.9", "10.96.0.10", 80, received_by="cni0"),
            PacketVerdict.DROP,
        ),
        ("filter FORWARD -o eth0 -j DROP", Packet("tcp", "10.244.1.1", "10.244.9.9", 80), PacketVerdict.PASS),
        ("filter OUTPUT -o eth0 -j DROP", LEAVING, PacketVerdict.DROP),
        (
            "filter INPUT -i lo -j DROP",
            Packet("tcp", "127.0.0.1", "127.0.0.1", 80, starts_here=True),
            PacketVerdict.DROP,
        ),
    ],
)
def test_interfaces_follow_the_most_specific_route(rule: str, packet: Packet, verdict: PacketVerdict) -> None:
    """Unless the packet has one."""
    assert traced(rule, packet).verdict is verdict
