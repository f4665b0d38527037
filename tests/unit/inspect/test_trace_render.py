"""How traces look to people and to programs: packets through recorded rules against kept texts.

`python -m tests.unit.inspect.test_trace_render` writes the kept texts anew, for their changes to be read.
"""

import json
from pathlib import Path

import click
import pytest

from pykubeproxy.inspect.trace import render_json, render_text
from pykubeproxy.inspect.trace.model import Trace, trace_packet
from pykubeproxy.inspect.trace.packet import Host, Packet
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.ruleset import parse
from tests.cases import ADDRESSES, expected, load_case

FOLDER = Path(__file__).parents[2] / "data" / "trace"
POD, OUTSIDE, HERE = "10.244.1.11", "203.0.113.77", "192.168.99.10"
# The name of a kept text: the recorded case, and the packet.
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
    return click.unstyle(render_text.text(traced(name)))


def document(name: str) -> str:
    return json.dumps(render_json.document(traced(name)), indent=1) + "\n"


@pytest.mark.parametrize("name", PACKETS)
def test_text(name: str) -> None:
    """The answer first, then the way there; within 80 columns."""
    assert text(name) == (FOLDER / f"{name}.txt").read_text()
    assert max(map(len, text(name).splitlines())) <= 80


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document(name: str) -> None:
    """The document for programs: verdict, endpoints and every step."""
    assert document(name) == (FOLDER / f"{name}.json").read_text()


@pytest.mark.parametrize("name", PACKETS)
def test_documented_keys(name: str) -> None:
    """Each document has the keys and the kinds of values that its description promises."""
    made = json.loads(document(name))
    assert list(made) == ["apiVersion", "packet", "verdict", "masquerade", "endpoints", "rejections", "steps"]
    assert made["apiVersion"] == "pykubeproxy/v1"
    assert made["verdict"] in ("dnat", "reject", "drop", "pass")
    assert isinstance(made["masquerade"], bool)
    for endpoint in made["endpoints"]:
        assert list(endpoint) == ["address", "port", "probability", "masquerade"]
    for step in made["steps"]:
        assert list(step) == ["table", "chain", "rule", "matched", "reason"]
        assert step["reason"]


def many(number: int) -> Trace:
    """A packet that may get to that many endpoints."""
    rules = [
        f"-A PREROUTING -m statistic --mode random --probability {1 / (number - i):.11f} "
        f"-j DNAT --to-destination 10.244.1.{i}:80"
        for i in range(number)
    ]
    rules.append("-A POSTROUTING -j MASQUERADE")
    saved = "\n".join(["*nat", *rules, "COMMIT", ""])
    return trace_packet(parse(Family.IPV4, saved), Packet("tcp", OUTSIDE, "10.96.0.1", 80), Host())


def test_many_endpoints() -> None:
    """Of very many endpoints the first are shown, and the rest summed up; the way out is there all the same."""
    lines = click.unstyle(render_text.text(many(100))).splitlines()
    assert lines[1] == "goes to one of 100 endpoints, masqueraded: its source is replaced"
    assert lines[22] == "    80%  80 more (-o json lists all)"
    assert "and 96 more endpoints (-o json lists all)" in lines
    assert "nat POSTROUTING" in lines
    assert len(lines) < 50
    made = render_json.document(many(100))
    assert len(made["endpoints"]) == 100  # type: ignore[arg-type]
    assert len(made["steps"]) == 101  # type: ignore[arg-type]


def test_partly_dropped() -> None:
    """What others drop on the way to some endpoints is told with its share."""
    saved = """*nat
-A PREROUTING -m statistic --mode random --probability 0.75000000000 -j DNAT --to-destination 10.244.1.1:80
-A PREROUTING -j DNAT --to-destination 10.244.1.2:80
COMMIT
*filter
-A FORWARD -d 10.244.1.2/32 -m comment --comment "no entry" -j DROP
COMMIT
"""
    trace = trace_packet(parse(Family.IPV4, saved), Packet("tcp", OUTSIDE, "10.96.0.1", 80), Host())
    assert click.unstyle(render_text.text(trace)).splitlines()[1:4] == [
        "goes to one endpoint and keeps its source",
        "    75%  10.244.1.1:80",
        "    25%  dropped in filter FORWARD: no entry",
    ]


def test_styles_are_for_terminals() -> None:
    """The text is styled, and reads the same without the styles."""
    styled = render_text.text(traced("refused"))
    assert "\x1b[1m10.244.1.11 to 10.96.1.1:80, TCP\x1b[0m" in styled
    assert "\x1b[33mis rejected in filter KUBE-SERVICES" in styled


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PACKETS:
        (FOLDER / f"{name}.txt").write_text(text(name))
    for name in DOCUMENTS:
        (FOLDER / f"{name}.json").write_text(document(name))
