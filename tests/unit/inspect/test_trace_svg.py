"""The picture of a trace: an SVG document whose bands are as wide as the shares of packets."""

import re
from xml.etree import ElementTree

import msgspec
import pytest

from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.trace.journey import TracedWay
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.inspect.trace.svg import FULL, svg
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import parse
from tests.cases import ADDRESSES, NAMES, expected, load_case
from tests.fakes.three_nodes import ThreeNodes
from tests.traces import report_of
from tests.unit.inspect.test_hops import BALANCER, CLUSTER_IP, POD1
from tests.unit.inspect.test_trace_render import OUTSIDE, PACKETS, POD, report, rules_to_many

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert(1)</script>&\"' \u202e\x1b[31m \udc80 \ufffe"
PACKET = Packet("tcp", OUTSIDE, "10.96.0.1", 80)


def drawn(report: TraceReport, *, wide: bool = False) -> ElementTree.Element:
    return ElementTree.fromstring(svg(report, wide=wide))


def of_rules(saved: str) -> TraceReport:
    """Return the report about a packet through rules in the form of iptables-save."""
    return report_of(parse(Family.IPV4, saved), PACKET, NodeNetwork())


def texts(root: ElementTree.Element) -> list[str]:
    """Return the lines of text, from the first box to the last."""
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def bands(root: ElementTree.Element, kind: str = ".+") -> list[float]:
    """Return the shares of the ends: the widths of the bands to them, as parts of the whole."""
    rows = (
        element
        for element in root.iter(f"{SVG}rect")
        if re.fullmatch(rf"band {kind}", element.get("class", ""))
    )
    return [float(element.attrib["height"]) / FULL for element in rows]


def overlap(root: ElementTree.Element) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Return the pairs of boxes that overlap, or that are not inside the picture."""
    boxes = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")]
    sides = []
    for box in boxes:
        assert box is not None
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        sides.append((x, y, x + width, y + height, box.attrib))
    right, bottom = (float(root.attrib[name]) for name in ("width", "height"))
    outside = [(it[4], it[4]) for it in sides if it[0] < 0 or it[1] < 0 or it[2] > right or it[3] > bottom]
    return outside + [
        (one[4], other[4])
        for number, one in enumerate(sides)
        for other in sides[:number]
        if one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
    ]


@pytest.mark.parametrize("name", PACKETS)
def test_a_picture_needs_nothing_else(name: str) -> None:
    """No script, font, link or image; it has a title and a description, and a dark form."""
    text = svg(report(name), wide=True)
    root = ElementTree.fromstring(text)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        *("svg", "title", "desc", "style", "rect", "g", "text")
    }
    assert not re.search(r"url\(|@import|@font-face|href|<script|\son\w+=", text)
    assert [child.tag.removeprefix(SVG) for child in root[:2]] == ["title", "desc"]
    assert root.attrib["aria-labelledby"] == "t d"
    assert "@media (prefers-color-scheme: dark)" in text
    assert text == svg(report(name), wide=True)


@pytest.mark.parametrize("name", NAMES)
def test_bands_are_the_shares_in_every_case(name: str) -> None:
    """No box covers another one."""
    rules = expected(load_case(name), Family.IPV4)
    for destination, port in (("10.96.1.1", 80), ("198.51.100.5", 80), ("192.168.99.10", 30080)):
        for source in (POD, OUTSIDE):
            packet = Packet("tcp", source, destination, port)
            found = report_of(rules, packet, NodeNetwork(frozenset(ADDRESSES)))
            root = drawn(found)
            masqueraded = [
                end.probability for way in found.ways for end in way.ends if end.masqueraded_on == ""
            ]
            assert sum(bands(root)) == pytest.approx(1, abs=1e-3)
            assert sum(bands(root, "masqueraded")) == pytest.approx(sum(masqueraded), abs=1e-3)
            assert overlap(root) == []


def test_rules_that_decide_and_endpoints() -> None:
    """A pod that may reach itself is masqueraded on that way only."""
    root = drawn(report("hairpin"))
    assert [text.strip() for text in texts(root)] == [
        "10.244.1.11 goes to one of 2 endpoints of 10.96.1.1:80.",
        "10.244.1.11 to 10.96.1.1:80, TCP",
        "this node, which receives the packet:",
        "nat KUBE-SERVICES: matches ns1/web:http cluster",
        "IP",
        *("nat KUBE-SEP-LXRUOG7B5IJ5LW4S: marked for", "masquerading: its source is 10.244.1.11"),
        *("nat KUBE-SEP-LXRUOG7B5IJ5LW4S: to endpoint", "10.244.1.11:8080"),
        *("nat KUBE-SEP-ZQEN7BSA6ALCJZ33: to endpoint", "10.244.2.12:8080"),
        *(
            "nat KUBE-POSTROUTING: masqueraded: this node",
            "replaces the source of packets to",
            "10.244.1.11:8080",
        ),
        *("50%", "10.244.1.11:8080; masqueraded by", "this node"),
        *("50%", "10.244.2.12:8080; sees client", "10.244.1.11"),
        "A band is as wide as its share of new connections.",
    ]
    assert (bands(root, "masqueraded"), bands(root, "kept")) == ([0.5], [0.5])
    titles = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert any(title.startswith("nat PREROUTING: ") and "\nnat KUBE-SERVICES: " in title for title in titles)


def test_steps_are_shown_on_demand() -> None:
    shown = "\n".join(texts(drawn(report("affinity"), wide=True)))
    assert "the client is assumed to be new, without affinity to an endpoint" in shown


def test_each_node_on_the_way_has_a_box() -> None:
    root = drawn(ThreeNodes("clusterip-three").trace(POD1, CLUSTER_IP))
    shown = texts(root)
    roles = ("node1, where the packet starts:", "node2, after node1:", "node3, after node1:")
    assert {*roles} <= {*shown}
    assert bands(root) == pytest.approx([1 / 3] * 3, abs=1e-4)
    assert overlap(root) == []


def test_each_way_into_the_cluster_is_drawn() -> None:
    root = drawn(ThreeNodes("lb-local").trace(OUTSIDE, BALANCER))
    assert (len(bands(root, "kept")), len(bands(root, "failed"))) == (2, 1)
    nodes = ThreeNodes("lb-local-none")
    assert "also through node3 (from EndpointSlices; rules not read)" in texts(
        drawn(nodes.trace(OUTSIDE, BALANCER))
    )


def test_nodes_that_are_not_read_are_drawn() -> None:
    nodes = ThreeNodes("lb-local")
    nodes.unread["node1"] = "runs kube-proxy in IPVS mode"
    ways = [TracedWay("node1"), TracedWay(None, ("node2", "node3"))]
    root = drawn(nodes.trace(OUTSIDE, BALANCER, entrances=ways))
    shown = " ".join(text.strip() for text in texts(root))
    assert "rules unknown: runs kube-proxy in IPVS mode" in shown
    assert "through node2 and node3: they have" in shown
    assert overlap(root) == []


@pytest.mark.parametrize("rule", ['-m comment --comment "{}" -j DROP', "-j DROP --{}", "-m {} -j DROP"])
def test_foreign_text_is_escaped(rule: str) -> None:
    """Markup and control characters in rules are only text."""
    text = HOSTILE.replace('"', '\\"')
    saved = f"*filter\n-A FORWARD {rule.format(text)}\n-A FORWARD -m comment --comment last -j DROP\nCOMMIT\n"
    document = svg(of_rules(saved), wide=True)
    root = ElementTree.fromstring(document.encode())
    assert not list(root.iter(f"{SVG}script"))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ufffe]", document)


@pytest.mark.parametrize("number", [12, 13, 1000])
def test_many_endpoints_are_summed_up(number: int) -> None:
    """The bands still add up; the picture does not grow."""
    document = svg(report_of(rules_to_many(number), PACKET, NodeNetwork()), wide=True)
    root = ElementTree.fromstring(document)
    shares = bands(root)
    assert len(shares) == 12
    assert sum(shares) == pytest.approx(1, abs=1e-2)
    assert (f"{number - 11} more" in texts(root)) is (number > 12)
    assert len(document) < 16_000


def test_a_different_end_is_shown_beside_many_others() -> None:
    """One endpoint of 200 is masqueraded."""
    rules = [
        f"-A PREROUTING -m statistic --mode random --probability {1 / (200 - i):.11f} "
        f"-j DNAT --to-destination 10.244.2.{i}:80"
        for i in range(200)
    ]
    rules.append("-A POSTROUTING -d 10.244.2.150/32 -j MASQUERADE")
    root = drawn(of_rules("\n".join(["*nat", *rules, "COMMIT", ""])))
    assert bands(root, "masqueraded") == pytest.approx([1 / 200], abs=1e-4)
    assert "194 more" in texts(root)


def test_many_routes_are_summed_up() -> None:
    nodes = ThreeNodes("clusterip-one")
    found = nodes.trace(POD1, CLUSTER_IP)
    (way,) = found.ways
    ends = tuple(
        msgspec.structs.replace(way.ends[0], probability=0.05, route=("node1", f"node{number}"))
        for number in range(20)
    )
    visits = tuple(
        msgspec.structs.replace(way.visits[0], node=f"node{number}", route=("node1",)) for number in range(20)
    )
    ways = (msgspec.structs.replace(way, ends=ends, visits=(way.visits[0], *visits)),)
    root = drawn(msgspec.structs.replace(found, ways=ways))
    assert sum(bands(root)) == pytest.approx(1, abs=1e-2)
    assert "9 more, on other ways" in texts(root)
    assert overlap(root) == []


def test_long_rules_are_cut() -> None:
    """East Asian characters are twice as wide."""
    comment = f'-m comment --comment "{"word" * 50}{chr(0x5B57) * 50}" -j DROP'
    root = drawn(of_rules(f"*filter\n-A FORWARD {comment}\nCOMMIT\n"))
    assert float(root.attrib["width"]) < 800
    assert any(text.endswith("…") for text in texts(root))
