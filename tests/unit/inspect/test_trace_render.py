"""Render traces: packets through recorded rules against golden files.

`python -m tests.unit.inspect.test_trace_render` rewrites the golden files for review.
"""

from pathlib import Path

import click
import pytest

from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.objects import Family, family_of
from pykubeproxy.report.document import document, json_text
from pykubeproxy.report.text import text
from pykubeproxy.rules.iptables_save import parse
from pykubeproxy.rules.ruleset import Ruleset
from tests.cases import ADDRESSES, expected, load_case
from tests.traces import report_of

FOLDER = Path(__file__).parents[2] / "data" / "trace"
POD, OUTSIDE, HERE = "10.244.1.11", "203.0.113.77", "192.168.99.10"
# By the name of the golden file: the recorded case and the packet.
PACKETS = {
    "affinity": ("affinity", Packet("tcp", POD, "10.96.1.1", 80)),
    "dropped-firewall": ("lb-source-ranges", Packet("tcp", OUTSIDE, "198.51.100.5", 80)),
    "dropped-not-local": ("lb-local-none", Packet("tcp", OUTSIDE, "198.51.100.5", 80, received_by="eth0")),
    "hairpin": ("lb-local", Packet("tcp", POD, "10.96.1.1", 80)),
    "ipv6": ("dual-stack", Packet("tcp", "2001:db8::7", "fd00:10:96::1", 80)),
    "node-port-loopback": ("nodeport", Packet("tcp", "127.0.0.1", "127.0.0.1", 30080, starts_here=True)),
    "node-to-cluster-ip": ("clusterip-three", Packet("tcp", HERE, "10.96.1.1", 80, starts_here=True)),
    "nothing": ("empty", Packet("udp", POD, "8.8.8.8", 53)),
    "outside-local": ("lb-local", Packet("tcp", OUTSIDE, "198.51.100.5", 80, received_by="eth0")),
    "refused": ("no-endpoints", Packet("tcp", POD, "10.96.1.1", 80)),
}
DOCUMENTS = ("dropped-firewall", "hairpin", "ipv6", "refused")


def report(name: str) -> TraceReport:
    case, packet = PACKETS[name]
    rules = expected(load_case(case), family_of(packet.destination))
    return report_of(rules, packet, NodeNetwork(frozenset(ADDRESSES)))


def shown(name: str) -> str:
    """Return the text, without and with steps."""
    made = report(name)
    return click.unstyle(text(made.blocks(wide=False)) + "\n---\n" + text(made.blocks(wide=True))) + "\n"


def as_json(name: str) -> str:
    return json_text(document(report(name)))


@pytest.mark.parametrize("name", PACKETS)
def test_text_equals_golden_file(name: str) -> None:
    """The answer comes first, within 80 columns."""
    assert shown(name) == (FOLDER / f"{name}.txt").read_text()
    assert max(map(len, shown(name).splitlines())) <= 80


@pytest.mark.parametrize("name", DOCUMENTS)
def test_json_equals_golden_file(name: str) -> None:
    """Ends, decisions and every step."""
    assert as_json(name) == (FOLDER / f"{name}.json").read_text()


def rules_to_many(number: int) -> Ruleset:
    """Return rules with this number of endpoints."""
    rules = [
        f"-A PREROUTING -m statistic --mode random --probability {1 / (number - i):.11f} "
        f"-j DNAT --to-destination 10.244.{1 + i // 250}.{i % 250}:80"
        for i in range(number)
    ]
    rules.append("-A POSTROUTING -j MASQUERADE")
    return parse(Family.IPV4, "\n".join(["*nat", *rules, "COMMIT", ""]))


def test_many_endpoints_are_summarized() -> None:
    """The first are shown; the steps after DNAT are complete."""
    made = report_of(rules_to_many(100), Packet("tcp", OUTSIDE, "10.96.0.1", 80), NodeNetwork())
    lines = click.unstyle(text(made.blocks(wide=True))).splitlines()
    assert lines[0] == f"{OUTSIDE} goes to one of 100 endpoints of 10.96.0.1:80."
    assert " 1%  10.244.1.0:80; masqueraded by this node" in lines
    assert "80%  80 more (-o json lists all)" in lines
    assert "  and 96 more endpoints (-o json lists all)" in lines
    assert "  nat POSTROUTING" in lines
    assert len(lines) < 55
    (way,) = made.ways
    assert len(way.ends) == 100
    assert len(way.visits[0].steps) == 101


def test_partial_drops_have_a_share() -> None:
    saved = """*nat
-A PREROUTING -m statistic --mode random --probability 0.75000000000 -j DNAT --to-destination 10.244.1.1:80
-A PREROUTING -j DNAT --to-destination 10.244.1.2:80
COMMIT
*filter
-A FORWARD -d 10.244.1.2/32 -m comment --comment "no entry" -j DROP
COMMIT
"""
    made = report_of(parse(Family.IPV4, saved), Packet("tcp", OUTSIDE, "10.96.0.1", 80), NodeNetwork())
    assert made.message == (
        f"{OUTSIDE} reaches 10.96.0.1:80 with 75% of its connections; this node drops the others (no entry)."
    )
    assert [end.text.replace("\u2060", "") for end in made.ways[0].ends][1] == (
        "dropped on this node in filter FORWARD, on the way to 10.244.1.2:80"
    )


def test_styles_do_not_change_the_text() -> None:
    styled = text(report("refused").blocks(wide=False))
    assert "\x1b[31m10.244.1.11 does not reach" in styled


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PACKETS:
        (FOLDER / f"{name}.txt").write_text(shown(name))
    for name in DOCUMENTS:
        (FOLDER / f"{name}.json").write_text(as_json(name))
