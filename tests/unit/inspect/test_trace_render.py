"""Render traces: packets through recorded rules against golden files.

`python -m tests.unit.inspect.test_trace_render` rewrites the golden files for review.
"""

import json
from pathlib import Path

import click
import pytest

from pykubeproxy.inspect.trace import render
from pykubeproxy.inspect.trace.model import Trace, trace_packet
from pykubeproxy.inspect.trace.packet import Host, Packet
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.ruleset import parse
from tests.cases import ADDRESSES, expected, load_case

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


def traced(name: str) -> Trace:
    case, packet = PACKETS[name]
    rules = expected(load_case(case), family_of(packet.destination))
    return trace_packet(rules, packet, Host(frozenset(ADDRESSES)))


def text(name: str) -> str:
    return click.unstyle(render.text(traced(name)))


def document(name: str) -> str:
    return json.dumps(render.document(traced(name)), indent=1) + "\n"


@pytest.mark.parametrize("name", PACKETS)
def test_text_equals_golden_file(name: str) -> None:
    """The answer comes first, within 80 columns."""
    assert text(name) == (FOLDER / f"{name}.txt").read_text()
    assert max(map(len, text(name).splitlines())) <= 80


@pytest.mark.parametrize("name", DOCUMENTS)
def test_json_equals_golden_file(name: str) -> None:
    """PacketVerdict, endpoints and every step."""
    assert document(name) == (FOLDER / f"{name}.json").read_text()


@pytest.mark.parametrize("name", PACKETS)
def test_json_has_the_documented_keys_and_types(name: str) -> None:
    made = json.loads(document(name))
    assert list(made) == [
        "apiVersion",
        "packet",
        "names",
        "verdict",
        "masquerade",
        "endpoints",
        "rejections",
        "steps",
    ]
    assert made["apiVersion"] == "pykubeproxy/v1"
    assert made["verdict"] in ("dnat", "reject", "drop", "pass")
    assert isinstance(made["masquerade"], bool)
    for endpoint in made["endpoints"]:
        assert list(endpoint) == ["address", "port", "probability", "masquerade"]
    for step in made["steps"]:
        assert list(step) == ["table", "chain", "rule", "matched", "reason"]
        assert step["reason"]


def trace_to_many(number: int) -> Trace:
    """Return the trace of a packet with this number of possible endpoints."""
    rules = [
        f"-A PREROUTING -m statistic --mode random --probability {1 / (number - i):.11f} "
        f"-j DNAT --to-destination 10.244.{1 + i // 250}.{i % 250}:80"
        for i in range(number)
    ]
    rules.append("-A POSTROUTING -j MASQUERADE")
    saved = "\n".join(["*nat", *rules, "COMMIT", ""])
    return trace_packet(parse(Family.IPV4, saved), Packet("tcp", OUTSIDE, "10.96.0.1", 80), Host())


def test_many_endpoints_are_summarized() -> None:
    """The first are shown; the steps after DNAT are complete."""
    lines = click.unstyle(render.text(trace_to_many(100))).splitlines()
    assert lines[1] == "goes to one of 100 endpoints, masqueraded: its source is replaced"
    assert lines[22] == "    80%  80 more (-o json lists all)"
    assert "and 96 more endpoints (-o json lists all)" in lines
    assert "nat POSTROUTING" in lines
    assert len(lines) < 50
    made = render.document(trace_to_many(100))
    assert len(made["endpoints"]) == 100  # type: ignore[arg-type]
    assert len(made["steps"]) == 101  # type: ignore[arg-type]


def test_partial_drops_have_a_share() -> None:
    saved = """*nat
-A PREROUTING -m statistic --mode random --probability 0.75000000000 -j DNAT --to-destination 10.244.1.1:80
-A PREROUTING -j DNAT --to-destination 10.244.1.2:80
COMMIT
*filter
-A FORWARD -d 10.244.1.2/32 -m comment --comment "no entry" -j DROP
COMMIT
"""
    trace = trace_packet(parse(Family.IPV4, saved), Packet("tcp", OUTSIDE, "10.96.0.1", 80), Host())
    assert click.unstyle(render.text(trace)).splitlines()[1:4] == [
        "goes to one endpoint and keeps its source",
        "    75%  10.244.1.1:80",
        "    25%  dropped in filter FORWARD: no entry",
    ]


def test_styles_do_not_change_the_text() -> None:
    styled = render.text(traced("refused"))
    assert "\x1b[1m10.244.1.11 to 10.96.1.1:80, TCP\x1b[0m" in styled
    assert "\x1b[33mis rejected in filter KUBE-SERVICES" in styled


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PACKETS:
        (FOLDER / f"{name}.txt").write_text(text(name))
    for name in DOCUMENTS:
        (FOLDER / f"{name}.json").write_text(document(name))
