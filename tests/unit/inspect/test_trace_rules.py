"""Match single packets against single rules: share and reason."""

import pytest

from pykubeproxy.inspect.packets.iptables import compile_rule
from pykubeproxy.inspect.packets.packet import DNAT, NEW, NodeNetwork, Packet

HOST = NodeNetwork(frozenset({"192.168.99.10", "fd00:99::10"}))
PACKET = Packet("tcp", "10.244.1.5", "10.96.0.10", 80, received_by="eth0", sent_by="pod1", mark=0x4000)
IPV6 = Packet("udp", "fd00:10:244::5", "fd00:10:96::a", 53)


def share_of(rule: str, packet: Packet = PACKET) -> float:
    """Return the share of such packets that match."""
    split = compile_rule(f"{rule} -j TARGET").split(packet, HOST)
    return sum(share for _, share in split.matched)


def reason_of(rule: str, packet: Packet = PACKET) -> str:
    compiled = compile_rule(f"{rule} -j TARGET")
    return compiled.reason(packet, HOST, compiled.split(packet, HOST))


@pytest.mark.parametrize(
    "conditions",
    [
        "",
        "-s 10.244.1.5/32",
        "-s 10.244.0.0/16 -d 10.96.0.0/12",
        "! -s 10.245.0.0/16",
        "-d 0.0.0.10/0.0.0.255",
        "! -d 127.0.0.0/8",
        "-i eth0 -o pod+",
        "-i eth+",
        "! -i cbr0 ! -o lo",
        "-p tcp",
        "-p 6",
        "! -p udp",
        "! -f",
        "-p tcp -m tcp --dport 80",
        "-p tcp -m tcp --dport 1:1024",
        "-p tcp -m tcp --dport 80:",
        "-p tcp -m tcp ! --dport 443",
        "-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN",
        "-p tcp -m multiport --dports 443,70:90",
        '-m comment --comment "any -s 1.2.3.4 -j \\" thing"',
        "-m conntrack --ctstate RELATED,NEW",
        "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT",
        "-m state --state NEW",
        "-m addrtype ! --dst-type LOCAL",
        "-m addrtype --dst-type UNICAST --src-type UNICAST",
        "-m mark --mark 0x4000/0x4000",
        "-m mark ! --mark 0x1/0xff",
        "-m mark --mark 0x4000",
        "-m recent --set --name X --mask 255.255.255.255 --rsource",
        "-m nfacct --nfacct-name counted",
        "-m iprange --src-range 10.244.1.1-10.244.1.9",
        "-m limit --limit 3/min --limit-burst 5",
    ],
)
def test_packets_that_meet_all_conditions_match(conditions: str) -> None:
    assert share_of(conditions) == 1


@pytest.mark.parametrize(
    "conditions",
    [
        "! -s 10.244.1.5/32",
        "-s 10.244.1.6/32",
        "-s fd00::/8",
        "-d 0.0.0.11/0.0.0.255",
        "-i eth1",
        "-i eth0+ -o eth+",
        "-p udp",
        "-f",
        "-p tcp -m tcp --dport 81:90",
        "-p tcp -m tcp --tcp-flags SYN,ACK ACK",
        "-p tcp -m multiport ! --dports 443,70:90",
        "-m conntrack --ctstate INVALID",
        "-m conntrack --ctstate DNAT",
        "-m addrtype --src-type LOCAL",
        "-m addrtype --dst-type MULTICAST",
        "-m mark --mark 0x1/0x1",
        "-m recent --rcheck --seconds 60 --reap --name X --mask 255.255.255.255 --rsource",
        "-m recent --update --name X --rsource",
        "-m iprange ! --src-range 10.244.1.1-10.244.1.9",
    ],
)
def test_packets_that_fail_one_condition_do_not_match(conditions: str) -> None:
    assert share_of(conditions) == 0


@pytest.mark.parametrize(
    ("conditions", "share"),
    [
        ("-m statistic --mode random --probability 0.25000000000", 0.25),
        ("-m statistic --mode random ! --probability 0.25000000000", 0.75),
        ("-m statistic --mode nth --every 4 --packet 0", 0.25),
        ("-p tcp -m statistic --mode random --probability 0.50000000000 -m mark --mark 0x4000", 0.5),
        ("-p udp -m statistic --mode random --probability 0.50000000000", 0),
    ],
)
def test_random_matches_take_a_share(conditions: str, share: float) -> None:
    """Only of packets that meet the other conditions."""
    assert share_of(conditions) == share


@pytest.mark.parametrize(
    ("conditions", "share"),
    [
        ("-s fd00:10:244::/48 -p udp -m udp --dport 53", 1),
        ("-d ::a/::ff", 1),
        ("! -d ::1/128 -m addrtype --dst-type LOCAL", 0),
        ("-s 0.0.0.0/0", 0),
    ],
)
def test_ipv6_addresses_match_their_family_only(conditions: str, share: float) -> None:
    assert share_of(conditions, IPV6) == share


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "192.168.99.10", "::1", "fd00:99::10"])
def test_loopback_and_own_addresses_are_local(address: str) -> None:
    packet = Packet("tcp", address, address, 80)
    assert share_of("-m addrtype --dst-type LOCAL", packet) == 1
    assert share_of("-m addrtype --src-type LOCAL", packet) == 1


@pytest.mark.parametrize("negation", ["", "! "])
@pytest.mark.parametrize(
    "conditions", ["-m set {}--match-set BLOCKED src", "-m owner {}--uid-owner 0", "-m socket"]
)
def test_unknown_matches_do_not_match(conditions: str, negation: str) -> None:
    """Negated or not; the reason says so."""
    assert share_of(conditions.format(negation)) == 0
    assert "trace does not know" in reason_of(conditions.format(negation))


def test_translated_packets_have_state_dnat() -> None:
    """Beside state NEW."""
    packet = Packet("tcp", "192.0.2.1", "127.0.0.1", 80, states=(NEW, DNAT))
    guard = "! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT"
    assert share_of(guard, packet) == 0
    assert share_of("-m conntrack --ctstate DNAT", packet) == 1


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ("", "every packet matches"),
        ('-m comment --comment "x"', "every packet matches"),
        (
            "-d 10.96.0.10/32 -p tcp -m tcp --dport 80",
            "its destination is 10.96.0.10, it is TCP, its port is 80",
        ),
        ("! -s 10.244.0.0/16", "its source 10.244.1.5 is in 10.244.0.0/16"),
        ("! -s 10.9.0.0/16", "its source 10.244.1.5 is not in 10.9.0.0/16"),
        ("-s 10.244.1.6/32", "its source 10.244.1.5 is not 10.244.1.6"),
        ("-m mark ! --mark 0x4000/0x4000", "it has the mark 0x4000"),
        ("-m mark --mark 0x1/0x1", "it does not have the mark 0x1"),
        ("-m conntrack --ctstate NEW", "its state is NEW"),
        ("-m conntrack --ctstate RELATED,ESTABLISHED", "its state is not RELATED or ESTABLISHED"),
        ("-m addrtype --src-type LOCAL", "its source 10.244.1.5 is not an address of this node"),
        ("-i cbr0", "it came in by eth0, not cbr0"),
        (
            "-m statistic --mode random --probability 0.33333333349",
            "a random 33.33% of the packets that get here match",
        ),
        (
            "-m recent --rcheck --seconds 60 --name X",
            "the client is assumed to be new, without affinity to an endpoint",
        ),
    ],
)
def test_reason_names_the_conditions(conditions: str, reason: str) -> None:
    """All of them for a match, the first failed one otherwise."""
    assert reason_of(conditions) == reason


@pytest.mark.parametrize(
    ("conditions", "relevant"),
    [
        ("-d 10.96.0.11/32 -p tcp -m tcp --dport 80", False),
        ("-p udp", False),
        ("-p tcp -m tcp --dport 443", False),
        ("! -s 10.244.0.0/16 -d 10.96.0.11/32", False),
        ("! -s 10.244.0.0/16 -d 10.96.0.10/32", True),
        ("-d 10.96.0.10/32 -m conntrack --ctstate INVALID", True),
    ],
)
def test_rules_for_other_packets_are_irrelevant(conditions: str, relevant: bool) -> None:
    """By destination, protocol or port, whichever condition fails first."""
    assert bool(reason_of(conditions)) is relevant
