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


def test_probabilities_multiply_through_jumps() -> None:
    """Packets that no rule takes continue."""
    trace = traced(
        """
        nat PREROUTING -m statistic --mode random --probability 0.50000000000 -j GROUP
        nat PREROUTING -m statistic --mode random --probability 0.25000000000 -j DNAT --to-destination 10.244.1.3:80
        nat GROUP -m statistic --mode random --probability 0.25000000000 -j DNAT --to-destination 10.244.1.1:80
        nat GROUP -j DNAT --to-destination 10.244.1.2:80
        """
    )
    shares = {endpoint.address: endpoint.probability for endpoint in trace.endpoints}
    assert shares == {"10.244.1.1": 0.125, "10.244.1.2": 0.375, "10.244.1.3": 0.125}
    assert trace.verdict is PacketVerdict.DNAT


TREE = """
    nat PREROUTING -j KUBE-SERVICES
    nat KUBE-SERVICES -d 10.96.0.0/20 -j KUBE-SVC-D0
    nat KUBE-SERVICES -d 10.96.16.0/20 -j KUBE-SVC-D1
    nat KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
    nat KUBE-SVC-D0 -d 10.96.0.0/28 -j KUBE-SVC-D00
    nat KUBE-SVC-D00 -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.244.1.9:80
    nat KUBE-SVC-D00 -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-WEB
    nat KUBE-SVC-WEB -m statistic --mode random --probability 0.66666666651 -j KUBE-SVC-G0
    nat KUBE-SVC-WEB -j DNAT --to-destination 10.244.1.3:80
    nat KUBE-SVC-G0 -m statistic --mode random --probability 0.50000000000 -j DNAT --to-destination 10.244.1.1:80
    nat KUBE-SVC-G0 -j DNAT --to-destination 10.244.1.2:80
    nat KUBE-NODEPORTS -p tcp -m tcp --dport 30000:30063 -j KUBE-SVC-P0
    nat KUBE-NODEPORTS -p tcp -m tcp --dport 30064:30127 -j KUBE-SVC-P1
    nat KUBE-SVC-P1 -p tcp -m tcp --dport 30080 -j KUBE-SVC-WEB
    """


@pytest.mark.parametrize("packet", [COMING, TO_NODE], ids=["address", "node port"])
def test_dispatch_branches_and_groups_are_followed(packet: Packet) -> None:
    """By prefix and by port range."""
    trace = traced(TREE, packet)
    shares = {endpoint.address: endpoint.probability for endpoint in trace.endpoints}
    assert shares == pytest.approx({f"10.244.1.{n}": 1 / 3 for n in (1, 2, 3)}, abs=1e-9)


def test_packets_without_a_leaf_return_from_all_branches() -> None:
    trace = traced(TREE, Packet("tcp", "203.0.113.9", "10.96.0.11", 80))
    assert trace.verdict is PacketVerdict.PASS
    assert path_of(trace) == ["nat PREROUTING", "nat KUBE-SERVICES", "nat KUBE-SVC-D0"]


def test_an_endpoint_with_two_paths_is_listed_once() -> None:
    """With the sum of the probabilities."""
    trace = traced(
        """
        nat PREROUTING -m statistic --mode random --probability 0.25000000000 -j DNAT --to-destination 10.244.1.1:80
        nat PREROUTING -m comment --comment else -j DNAT --to-destination 10.244.1.1:80
        """
    )
    assert [endpoint.probability for endpoint in trace.endpoints] == [1.0]


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


def test_only_hairpin_packets_are_masqueraded() -> None:
    """The endpoint has its own flag; the trace's flag is for all endpoints."""
    rules = """
        nat PREROUTING -m statistic --mode random --probability 0.50000000000 -j A
        nat PREROUTING -j DNAT --to-destination 10.244.1.2:80
        nat A -s 10.244.1.1/32 -j MARK --set-xmark 0x4000/0x4000
        nat A -p tcp -j DNAT --to-destination 10.244.1.1:80
        nat POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
        nat POSTROUTING -j MASQUERADE
        """
    trace = traced(rules, Packet("tcp", "10.244.1.1", "10.96.0.10", 80))
    assert not trace.masquerade
    assert {endpoint.address: endpoint.masquerade for endpoint in trace.endpoints} == {
        "10.244.1.1": True,
        "10.244.1.2": False,
    }
    assert "to 10.244.1.2:80: it does not have the mark 0x4000" in [step.reason for step in trace.steps]


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


def test_empty_tables_accept_everything() -> None:
    trace = traced("filter :FORWARD ACCEPT [0:0]")
    assert (trace.verdict, trace.steps, trace.endpoints, trace.rejections) == (PacketVerdict.PASS, (), (), [])
