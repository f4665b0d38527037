"""Effects of targets on a packet."""

import pytest

from pykubeproxy.inspect.packets.iptables import compile_rule
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.packets.rule_set import RuleEffect, RuleEnd
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import parse
from tests.traces import trace_packet

PACKET = Packet("tcp", "10.244.1.5", "10.96.0.10", 80, mark=0x1)
IPV6 = Packet("tcp", "fd00::5", "fd00:96::a", 80)


def after(target: str, packet: Packet = PACKET) -> RuleEffect:
    ((effect, probability),) = compile_rule(f"-p tcp -j {target}").split(packet, NodeNetwork()).matched
    assert probability == 1
    return effect


@pytest.mark.parametrize(
    ("target", "end"),
    [
        ("ACCEPT", RuleEnd.ACCEPT),
        ("DROP", RuleEnd.DROP),
        ("REJECT --reject-with icmp-port-unreachable", RuleEnd.REJECT),
        ("DNAT --to-destination 10.244.1.11:8080", RuleEnd.ACCEPT),
        ("MASQUERADE --random-fully", RuleEnd.ACCEPT),
        ("MARK --set-xmark 0x4000/0x4000", None),
        ("CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80", None),
        ('LOG --log-prefix "seen: "', None),
        ("NFLOG --nflog-group 5", None),
    ],
)
def test_terminating_targets_end_the_table(target: str, end: RuleEnd | None) -> None:
    assert after(target).end is end


@pytest.mark.parametrize(
    ("to", "destination"),
    [
        ("10.244.1.11:8080", ("10.244.1.11", 8080)),
        ("10.244.1.11", ("10.244.1.11", 80)),
        (":8080", ("10.96.0.10", 8080)),
        ("10.244.1.11-10.244.1.19:8080-8089", ("10.244.1.11", 8080)),
        ("10.244.1.11:8080 --random --persistent", ("10.244.1.11", 8080)),
    ],
)
def test_dnat_changes_the_destination(to: str, destination: tuple[str, int]) -> None:
    """Omitted parts stay; the first of a range counts."""
    packet = after(f"DNAT --to-destination {to}").packet
    assert (packet.destination, packet.port) == destination
    assert packet.states == ("NEW", "DNAT")


@pytest.mark.parametrize(
    ("to", "destination"),
    [
        ("[fd00:1::11]:8080", ("fd00:1::11", 8080)),
        ("[fd00:1::11]", ("fd00:1::11", 80)),
        ("fd00:1::11", ("fd00:1::11", 80)),
    ],
)
def test_dnat_parses_ipv6_destinations(to: str, destination: tuple[str, int]) -> None:
    """With and without brackets and port."""
    packet = after(f"DNAT --to-destination {to}", IPV6).packet
    assert (packet.destination, packet.port) == destination


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ("MASQUERADE", "10.244.1.5"),
        ("SNAT --to-source 192.0.2.1", "192.0.2.1"),
        ("SNAT --to-source 192.0.2.1:1024-2048", "192.0.2.1"),
        ("SNAT --to-source 192.0.2.1-192.0.2.9", "192.0.2.1"),
    ],
)
def test_source_translation_names_the_source(target: str, source: str) -> None:
    """SNAT has an address; MASQUERADE depends on routes."""
    packet = after(target).packet
    assert packet.source == source
    assert packet.states == ("NEW", "SNAT")


@pytest.mark.parametrize(
    ("options", "mark"),
    [
        ("--set-xmark 0x4000/0x4000", 0x4001),
        ("--set-xmark 0x1/0x0", 0x0),
        ("--set-xmark 0x8/0xffffffff", 0x8),
        ("--set-mark 0x8", 0x8),
        ("--or-mark 0x6", 0x7),
        ("--and-mark 0xfffffffe", 0x0),
        ("--xor-mark 0x3", 0x2),
    ],
)
def test_mark_options_change_the_mark(options: str, mark: int) -> None:
    """All of them, from mark 0x1."""
    assert after(f"MARK {options}").packet.mark == mark


@pytest.mark.parametrize("target", ["CT --notrack", "NOTRACK"])
def test_untracked_packets_are_not_translated(target: str) -> None:
    """They have no state NEW either."""
    assert after(target).packet.states == ("UNTRACKED",)
    assert "not tracked" in after(target).remark


def test_unknown_targets_are_reported() -> None:
    """Their effect is not guessed."""
    rules = parse(Family.IPV4, "*filter\n-A FORWARD -j NFQUEUE --queue-num 3\n-A FORWARD -j DROP\nCOMMIT\n")
    queued, dropped = trace_packet(rules, PACKET, NodeNetwork()).steps
    assert "NFQUEUE" in queued.reason
    assert "continues" in queued.reason
    assert dropped.matched


@pytest.mark.parametrize(
    "target",
    [
        "DNAT --to-destination 10.244.1.999:80",
        "DNAT --to-destination 10.244.1.11:http",
        "DNAT --to-destination 10.244.1.11:99999",
        "SNAT --to-source nowhere",
        "MARK --set-xmark x",
    ],
)
def test_an_unreadable_value_has_no_effect(target: str) -> None:
    """iptables writes none, but a file may have one. The step says so."""
    effect = after(target)
    assert (effect.packet, effect.end) == (PACKET, None)
    assert effect.remark.startswith("cannot parse a value in the rule: ")
