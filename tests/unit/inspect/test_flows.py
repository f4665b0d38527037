"""Flows as `conntrack` and the kernel print them."""

import pytest

from pykubeproxy.inspect.flows import Flow, FlowSide, RememberedClient, parse_flow_table, parse_flows
from pykubeproxy.objects import Family, Protocol

NATTED = Flow(
    family=Family.IPV4,
    protocol=Protocol.TCP,
    original=FlowSide("10.244.1.5", 40000, "10.96.0.10", 80),
    reply=FlowSide("10.244.2.7", 8080, "192.168.0.1", 1024),
    state="ESTABLISHED",
    assured=True,
    timeout=431999,
)
TUPLES = "src=10.244.1.5 dst=10.96.0.10 sport=40000 dport=80 "
REPLY = "src=10.244.2.7 dst=192.168.0.1 sport=8080 dport=1024 "


@pytest.mark.parametrize(
    "line",
    [
        f"tcp      6 431999 ESTABLISHED {TUPLES}{REPLY}[ASSURED] mark=0 use=1",
        f"ipv4     2 tcp      6 431999 ESTABLISHED {TUPLES}{REPLY}[ASSURED] mark=0 use=1",
        f"ipv4     2 tcp      6 431999 ESTABLISHED {TUPLES}packets=2 bytes=90 {REPLY}packets=1 [ASSURED] mark=0 zone=0",
    ],
    ids=["conntrack", "conntrack -o extended", "nf_conntrack"],
)
def test_reads_each_format(line: str) -> None:
    """All formats of one entry give the same flow, with its endpoint and the source that the endpoint sees."""
    assert parse_flows(f"{line}\n") == [NATTED]
    assert (NATTED.translated_to, NATTED.source_seen) == ("10.244.2.7:8080", "192.168.0.1:1024")


def test_reads_an_unreplied_ipv6_flow_without_nat() -> None:
    """The kernel prints IPv6 addresses with all digits."""
    (flow,) = parse_flows(
        "ipv6     10 udp      17 29 src=fd01:0000:0000:0000:0000:0000:0000:0001"
        " dst=fd96:0000:0000:0000:0000:0000:0000:0010 sport=4000 dport=53 [UNREPLIED]"
        " src=fd96:0000:0000:0000:0000:0000:0000:0010 dst=fd01:0000:0000:0000:0000:0000:0000:0001"
        " sport=53 dport=4000 mark=5 zone=0 use=2"
    )
    assert flow == Flow(
        family=Family.IPV6,
        protocol=Protocol.UDP,
        original=FlowSide("fd01::1", 4000, "fd96::10", 53),
        reply=FlowSide("fd96::10", 53, "fd01::1", 4000),
        unreplied=True,
        timeout=29,
        mark=5,
    )
    assert flow.translated_to == ""
    assert flow.source_seen == "[fd01::1]:4000"


def test_reads_a_flow_that_hardware_forwards() -> None:
    """Such a flow has no timeout."""
    (flow,) = parse_flows(
        f"ipv4     2 tcp      6 ESTABLISHED {TUPLES}{REPLY}[HW_OFFLOAD] mark=0 zone=0 use=2"
    )
    assert (flow.timeout, flow.state) == (None, "ESTABLISHED")


@pytest.mark.parametrize(
    "line",
    [
        "conntrack v1.4.7 (conntrack-tools): 2 flow entries have been shown.",
        "icmp     1 29 src=10.0.0.1 dst=10.0.0.2 type=8 code=0 id=1 src=10.0.0.2 dst=10.0.0.1 type=0 code=0 id=1 use=1",
        f"tcp      6 431999 ESTABLISHED {TUPLES}{REPLY}[ASSURED] mark=0 zone=7 use=1",
        f"tcp      6 431999 ESTABLISHED {TUPLES}zone-orig=7 {REPLY}[ASSURED] mark=0 use=1",
        f"tcp      6 431999 ESTABLISHED {TUPLES.replace('10.96', 'x')}{REPLY}[ASSURED] mark=0 use=1",
        f"tcp      6 {'9' * 5000} ESTABLISHED {TUPLES}{REPLY}[ASSURED] mark=0 use=1",
    ],
    ids=["summary", "icmp", "zone", "zone of one direction", "broken", "huge number"],
)
def test_skips_all_other_lines(line: str) -> None:
    """Other zones belong to other programs."""
    assert parse_flows(line) == []


def test_reads_the_clients_of_affinity_lists() -> None:
    """As our command prints them, and as grep does for the files of the kernel."""
    text = (
        "KUBE-SEP-A: src=10.1.0.1 age=12\nKUBE-SEP-A: src=10.1.0.2\n"
        "/proc/net/xt_recent/KUBE-SEP-B:src=fd01:0000:0000:0000:0000:0000:0000:0001 ttl: 64 last_seen: 42 oldest_pkt: 1 42\n"
        "KUBE-SEP-B: src=nonsense\n"
    )
    assert parse_flow_table(text).remembered == (
        RememberedClient("KUBE-SEP-A", "10.1.0.1", 12),
        RememberedClient("KUBE-SEP-A", "10.1.0.2", None),
        RememberedClient("KUBE-SEP-B", "fd01::1", None),
    )
