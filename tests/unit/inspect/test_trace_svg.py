"""The picture of a trace: an SVG document whose bands are as wide as the shares of packets."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.packets.walk import NodeTrace
from pykubeproxy.inspect.trace.svg import FULL, svg
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import parse
from tests.cases import ADDRESSES, NAMES, expected, load_case
from tests.traces import trace_packet
from tests.unit.inspect.test_trace_random import packet_for, packets
from tests.unit.inspect.test_trace_random import traced as random_trace
from tests.unit.inspect.test_trace_render import OUTSIDE, PACKETS, POD, trace_to_many, traced
from tests.unit.inspect.test_trace_walk import traced as small_trace
from tests.unit.rules.test_packets import World, worlds

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert(1)</script>&\"' \u202e\x1b[31m \udc80 \ufffe"


def drawn(trace: NodeTrace) -> ElementTree.Element:
    return ElementTree.fromstring(svg(trace))


def texts(root: ElementTree.Element) -> list[str]:
    """Return the lines of text, from the first box to the last."""
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def bands(root: ElementTree.Element, kind: str = "") -> list[float]:
    """Return the shares of the rows: the widths of the bands to their ends, as parts of the whole."""
    rows = (
        element
        for element in root.iter(f"{SVG}rect")
        if re.fullmatch(rf"band {kind or '.+'}", element.get("class", ""))
    )
    return [float(element.attrib["height"]) / FULL for element in rows]


def bends(root: ElementTree.Element) -> list[float]:
    """Return the widths of the same bands where they leave the chains that all packets pass."""
    found = []
    for element in root.iter(f"{SVG}path"):
        numbers = re.fullmatch(r"M(\S+) .* 0 0 1 (\S+) .*", element.attrib["d"])
        assert numbers, element.attrib["d"]
        found.append((float(numbers[2]) - float(numbers[1])) / FULL)
    return found


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
    text = svg(traced(name))
    root = ElementTree.fromstring(text)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        *("svg", "title", "desc", "style", "rect", "path", "g", "text")
    }
    assert not re.search(r"url\(|@import|@font-face|href|<script|\son\w+=", text)
    assert [child.tag.removeprefix(SVG) for child in root[:2]] == ["title", "desc"]
    assert root.attrib["aria-labelledby"] == "t d"
    assert "@media (prefers-color-scheme: dark)" in text
    assert text == svg(traced(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_case_is_drawn(name: str) -> None:
    """Bands add up to all packets, and no box covers another one."""
    rules = expected(load_case(name), Family.IPV4)
    for destination, port in (("10.96.1.1", 80), ("198.51.100.5", 80), ("192.168.99.10", 30080)):
        for source in (POD, OUTSIDE):
            packet = Packet("tcp", source, destination, port)
            root = drawn(trace_packet(rules, packet, NodeNetwork(frozenset(ADDRESSES))))
            assert sum(bands(root)) == pytest.approx(1, abs=1e-3)
            assert overlap(root) == []


@settings(max_examples=50, deadline=None)
@given(world=worlds, choice=packets)
@pytest.mark.usefixtures("small_trees")
def test_widths_are_the_shares(world: World, choice: tuple[str, str, int, str, int]) -> None:
    trace = random_trace(world, packet_for(world, choice))
    root = drawn(trace)
    assert sum(bands(root)) == pytest.approx(1, abs=1e-3)
    assert bends(root) == pytest.approx(bands(root), abs=1e-4)
    if len(trace.ends) <= 12:
        assert sorted(bands(root)) == pytest.approx(sorted(it.probability for it in trace.ends), abs=1e-4)
    masqueraded = sum(endpoint.probability for endpoint in trace.endpoints if endpoint.masquerade)
    assert sum(bands(root, "masqueraded")) == pytest.approx(masqueraded, abs=1e-3)
    assert overlap(root) == []


def test_chains_endpoints_and_masquerading() -> None:
    """A pod that may reach itself is masqueraded on that way only."""
    lines = texts(drawn(traced("hairpin")))
    assert lines == [
        "10.244.1.11 to 10.96.1.1:80, TCP",
        "goes to one of 2 endpoints, masqueraded on the way to 1 of them",
        "nat PREROUTING",
        "every packet matches (kubernetes service portals)",
        "nat KUBE-SERVICES",
        "its destination is 10.96.1.1, it is TCP, its port is 80 (ns1/web:http cluster IP)",
        "nat KUBE-SVC-4LVCYZMTA5CQO6SX",
        "no match: its source 10.244.1.11 is in 10.244.0.0/16 (ns1/web:http cluster IP)",
        "each packet takes one of 2 paths at random",
        *("KUBE-SEP-LXRUOG7B5IJ5LW4S", "sets the mark 0x4000", "its source is 10.244.1.11"),
        *("10.244.1.11:8080", "50%, masqueraded"),
        *("filter FORWARD", "KUBE-FORWARD", "ACCEPT", "it has the mark 0x4000"),
        *("nat POSTROUTING", "KUBE-POSTROUTING", "MASQUERADE"),
        *("kubernetes service traffic", "requiring SNAT"),
        *("KUBE-SEP-ZQEN7BSA6ALCJZ33", "ns1/web:http", "10.244.2.12:8080", "50%, keeps its source"),
        *("filter FORWARD", "no rule decides", "passes", "KUBE-PROXY-FIREWALL", "and 3 more"),
        *("nat POSTROUTING", "KUBE-POSTROUTING", "RETURN", "it does not have the mark", "0x4000"),
        "A band is as wide as its share of new connections.",
    ]


def test_rules_in_full_are_tooltips() -> None:
    titles = [element.text for element in drawn(traced("refused")).iter(f"{SVG}title")]
    assert any(title and title.startswith("-A FORWARD -m conntrack") for title in titles)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("dropped-firewall", ("KUBE-PROXY-FIREWALL", "DROP")),
        ("dropped-not-local", ("KUBE-EXTERNAL-SERVICES", "DROP", "ns1/web:http has no local endpoints")),
        ("refused", ("KUBE-SERVICES", "REJECT", "ns1/web:http has no endpoints")),
        ("nothing", ("8.8.8.8:53", "100%, passes unchanged")),
        ("affinity", ("no match: the client is assumed to be new, without affinity to an endpoint",)),
        ("outside-local", ("no match: its source 203.0.113.77 is not in 10.244.0.0/16",)),
        ("node-to-cluster-ip", ("nat OUTPUT", "sets the mark 0x4000: its source 192.168.99.10 is not in")),
    ],
)
def test_the_rule_that_decides_is_named(name: str, end: tuple[str, ...]) -> None:
    shown = "\n".join(texts(drawn(traced(name))))
    assert all(text in shown for text in end)
    assert bool(bands(drawn(traced(name)), "rejected")) is (
        name in ("dropped-firewall", "dropped-not-local", "refused")
    )


def test_part_of_the_packets_is_dropped() -> None:
    root = drawn(
        small_trace(
            """
            nat PREROUTING -m statistic --mode random --probability 0.75000000000 -j DNAT --to-destination 10.244.1.1:80
            nat PREROUTING -m comment --comment else -j DNAT --to-destination 10.244.1.2:80
            filter FORWARD -d 10.244.1.2/32 -m comment --comment "no entry" -j DROP
            """
        )
    )
    assert bands(root, "kept") == pytest.approx([0.75])
    assert bands(root, "rejected") == pytest.approx([0.25])
    assert texts(root)[1] == (
        "goes to the only endpoint and keeps its source; is dropped with a probability of 25%"
    )


def test_a_hairpin_packet_to_the_only_endpoint() -> None:
    """The chain of the endpoint is in the row, as with several endpoints."""
    root = drawn(
        small_trace(
            """
            nat PREROUTING -j SVC
            nat SVC -j SEP
            nat SEP -s 203.0.113.9/32 -j MARK-MASQ
            nat SEP -p tcp -m tcp -j DNAT --to-destination 10.244.1.1:80
            nat MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
            nat POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE
            """
        )
    )
    shown = texts(root)
    assert shown[shown.index("SEP") :][:3] == ["SEP", "sets the mark 0x4000", "its source is 203.0.113.9"]
    assert bands(root, "masqueraded") == [1]


def test_no_rules_at_all() -> None:
    root = drawn(small_trace("filter :FORWARD ACCEPT [0:0]"))
    assert texts(root)[1:] == [
        "matches no service and passes unchanged",
        "10.96.0.10:80",
        "100%, passes unchanged",
    ]


@pytest.mark.parametrize("rule", ['-m comment --comment "{}" -j DROP', "-j DROP --{}", "-m {} -j DROP"])
def test_foreign_text_is_escaped(rule: str) -> None:
    """Markup and control characters in rules are only text."""
    text = HOSTILE.replace('"', '\\"')
    saved = f"*filter\n-A FORWARD {rule.format(text)}\n-A FORWARD -m comment --comment last -j DROP\nCOMMIT\n"
    document = svg(
        trace_packet(parse(Family.IPV4, saved), Packet("tcp", OUTSIDE, "10.96.0.1", 80), NodeNetwork())
    )
    root = ElementTree.fromstring(document.encode())
    assert not list(root.iter(f"{SVG}script"))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ufffe]", document)


@pytest.mark.parametrize("number", [12, 13, 40, 1000])
def test_many_endpoints_are_summed_up(number: int) -> None:
    """The bands still add up; the picture does not grow."""
    document = svg(trace_to_many(number))
    root = ElementTree.fromstring(document)
    shares = bands(root)
    assert len(shares) == 12
    assert sum(shares) == pytest.approx(1, abs=1e-2)
    more = {f"and {number - 11} more"} if number > 12 else set()
    assert more == {text for text in texts(root) if text.startswith("and ")}
    assert len(document) < 16_000


def test_a_different_way_is_shown_beside_many_others() -> None:
    """One endpoint of 200 is masqueraded."""
    rules = [
        f"nat PREROUTING -m statistic --mode random --probability {1 / (200 - i):.11f} -j SEP{i}"
        for i in range(200)
    ]
    rules += [f"nat SEP{i} -j DNAT --to-destination 10.244.2.{i}:80" for i in range(200)]
    rules.append("nat POSTROUTING -d 10.244.2.150/32 -j MASQUERADE")
    root = drawn(small_trace("\n".join(rules)))
    assert bands(root, "masqueraded") == pytest.approx([1 / 200], abs=1e-4)
    assert {"10.244.2.150:80", "0.5%, masqueraded", "and 194 more"} <= set(texts(root))


def test_many_different_ways_are_summed_up() -> None:
    """Each endpoint has a rule of its own that drops its packets."""
    rules = [
        f"nat PREROUTING -m statistic --mode random --probability {1 / (200 - i):.11f} "
        f"-j DNAT --to-destination 10.244.2.{i}:80"
        for i in range(200)
    ]
    rules += [
        f'filter FORWARD -d 10.244.2.{i}/32 -m comment --comment "{"long " * 50}" -j DROP' for i in range(200)
    ]
    document = svg(small_trace("\n".join(rules)))
    root = ElementTree.fromstring(document)
    assert sum(bands(root)) == pytest.approx(1, abs=1e-2)
    assert "and 195 more paths" in texts(root)
    assert len(document) < 32_000
    assert overlap(root) == []


def test_long_paths_are_summed_up() -> None:
    """Many chains, in one hook or in many hooks, with long comments."""
    comment = f'-m comment --comment "{"word " * 50}"'
    rules = ["nat PREROUTING -j C0", *(f"nat C{i} {comment} -j C{i + 1}" for i in range(200))]
    rules += ["nat C200 -j DNAT --to-destination 10.244.1.1:80"]
    rules += [
        f"{table} {chain} {comment}" for table in ("mangle", "filter", "security") for chain in ("FORWARD",)
    ]
    rules += [f"{table} POSTROUTING {comment}" for table in ("mangle", "nat")]
    document = svg(small_trace("\n".join(rules)))
    root = ElementTree.fromstring(document)
    assert {"and 188 more chains", "and 2 more chains"} <= set(texts(root))
    assert len(document) < 40_000
    assert overlap(root) == []
