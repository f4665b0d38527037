"""The table of nodes, and the JSON document, of `kubectl pykubeproxy diff`."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.fleet.model import NodeResult, NodeVerdict
from pykubeproxy.inspect.fleet.services import Contested, WrongService
from pykubeproxy.inspect.fleet.settings import other_settings
from pykubeproxy.objects import Key
from pykubeproxy.wording import SafeText, counted, listed, one_line, styled, text_of, wrapped

_HEADER = ("NODE", "PROXY", "VERDICT", "WRONG", "SINCE AT LEAST")
_COLORS = {
    NodeVerdict.FOLLOWS: "green",
    NodeVerdict.CATCHING_UP: "yellow",
    NodeVerdict.DIFFERS: "red",
    NodeVerdict.NOT_COMPARED: "yellow",
}
# How many nodes, addresses of a Service, and Services a paragraph names.
_NODES = 8
_PLACES = 5
_SERVICES = 20


def text(results: Iterable[NodeResult]) -> SafeText:
    """Return a line for each node, then what is wrong on which nodes."""
    ordered = sorted(results, key=lambda it: _natural(it.node))
    paragraphs = [
        *_reasons(ordered),
        *_wrong(ordered),
        *_quarantined(ordered),
        *_contested(ordered),
        *_settings(ordered),
        _summary(ordered),
    ]
    return text_of(_table(ordered), *paragraphs)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that orders node2 before node10."""
    return tuple((int(digits or 0), other) for other, digits in re.findall(r"(\D+|^)(\d{0,18})", name))


def _table(results: Sequence[NodeResult]) -> list[str]:
    rows = [_HEADER, *(tuple(map(one_line, _row(it))) for it in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    verdicts = [None, *(it.verdict for it in results)]
    return [_line(row, widths, verdict) for row, verdict in zip(rows, verdicts, strict=True)]


def _row(result: NodeResult) -> tuple[str, ...]:
    compared = result.verdict is not NodeVerdict.NOT_COMPARED
    wrong = "all" if compared and result.reason else str(len(result.wrong)) if compared else ""
    return result.node, result.proxy, result.verdict.value, wrong, _time(result.since, " ")


def _line(row: Sequence[str], widths: Sequence[int], verdict: NodeVerdict | None) -> str:
    cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
    if verdict:
        cells[2] = styled(cells[2], _COLORS[verdict])
    return "  ".join(cells).rstrip()


def _time(since: float | None, separator: str) -> str:
    if since is None:
        return ""
    return f"{datetime.fromtimestamp(since, UTC):%Y-%m-%d{separator}%H:%M:%S}Z"


def _reasons(results: Sequence[NodeResult]) -> Iterator[list[str]]:
    """Yield a paragraph for each reason why nodes are not compared, or lack rules altogether."""
    nodes: dict[str, list[str]] = {}
    for it in results:
        if it.reason:
            nodes.setdefault(it.reason, []).append(it.node)
    for reason, names in nodes.items():
        yield wrapped(f"{_nodes(names)}: {reason}", "", "  ")


def _wrong(results: Sequence[NodeResult]) -> Iterator[list[str]]:
    """Yield a paragraph for the Services that are wrong in the same way on the same nodes."""
    nodes: dict[WrongService, list[str]] = {}
    for it in results:
        for service in it.wrong:
            nodes.setdefault(service, []).append(it.node)
    services: dict[tuple[str, ...], list[WrongService]] = {}
    for service, names in nodes.items():
        services.setdefault(tuple(names), []).append(service)
    for places, some in sorted(services.items(), key=lambda it: -len(it[0])):
        yield [
            styled(f"{_nodes(places)}: {counted(len(some), 'wrong Service')}", bold=True),
            *_lines(some),
        ]


def _lines(services: Sequence[WrongService]) -> Iterator[str]:
    for service in sorted(services)[:_SERVICES]:
        for it in service.differences:
            title = f"{service.key}:{it.port}" if it.port else str(service.key)
            origin = f" from {it.origin}" if it.origin else ""
            line = f"{title} at {listed(it.at, _PLACES)}{origin}: {it.text}"
            yield from wrapped(line, "  ", "    ")
    if len(services) > _SERVICES:
        yield f"  and {counted(len(services) - _SERVICES, 'more Service')}"


def _quarantined(results: Sequence[NodeResult]) -> Iterator[list[str]]:
    """Yield a paragraph for the nodes whose agents quarantined the same Services."""
    nodes: dict[tuple[Key, ...], list[str]] = {}
    for it in results:
        if it.quarantined:
            nodes.setdefault(it.quarantined, []).append(it.node)
    for services, names in nodes.items():
        line = (
            f"{_nodes(names)}: {counted(len(services), 'quarantined Service')}, not served:"
            f" {listed([str(it) for it in services], _SERVICES)}; `kubectl pykubeproxy status --node {names[0]}"
            " -o json` has the reason"
        )
        yield wrapped(line, "", "  ")


def _contested(results: Sequence[NodeResult]) -> Iterator[list[str]]:
    """Yield a paragraph for each address that several Services have."""
    nodes: dict[Contested, list[str]] = {}
    for it in results:
        for one in it.contested:
            nodes.setdefault(one, []).append(it.node)
    for one, names in sorted(nodes.items()):
        services = listed(one.services, _PLACES)
        line = f"{_nodes(names)}: {one.at} belongs to {services}; kube-proxy serves any one of them"
        yield wrapped(line, "", "  ")


def _settings(results: Sequence[NodeResult]) -> Iterator[list[str]]:
    for other in other_settings({it.node: it.settings for it in results if it.settings}):
        usual = f"{other.usual} on most nodes"
        yield wrapped(f"{_nodes(other.nodes)}: {other.name} is {other.value}, but {usual}", "", "  ")


def _summary(results: Sequence[NodeResult]) -> list[str]:
    counts = [
        f"{number} {verdict.value if number == 1 else verdict.value.removesuffix('s')}"
        for verdict in NodeVerdict
        if (number := sum(it.verdict is verdict for it in results))
    ]
    return [f"{counted(len(results), 'node')}: {', '.join(counts) or 'none'}."]


def _nodes(names: Sequence[str]) -> str:
    return listed(names, _NODES)


def document(results: Iterable[NodeResult]) -> dict[str, object]:
    """The comparison of nodes as a JSON document of version pykubeproxy/v1.

    {"apiVersion", "different": true if a node differs,
     "nodes": [{"node", "proxy": such as "kube-proxy v1.35.1", "pod": "namespace/name"; "" if unknown,
                "verdict": "follows"|"catching up"|"differs"|"not compared",
                "reason": why it is not compared, or which rules it lacks altogether; else "",
                "otherProxy": true if its proxy does not write such rules,
                "staleSince": time, or null; it has not followed the objects since then or longer,
                "wrong": [{"namespace", "name", "differences": [{
                  "port": its name, "at": ["ip:port" or "node port 30080"],
                  "origin": "the node"|"elsewhere", "" for both, "text": what clients get}]}],
                "quarantined": [{"namespace", "name"} of each Service that its agent quarantined],
                "contested": [{"at": "ip:port", "services": ["namespace/name"]}] of addresses that several Services
                  have; kube-proxy serves any one of them,
                "settings": {name of a setting of kube-proxy: what the rules show}}],
     "otherSettings": [{"name", "value", "usual": the value on most nodes, "nodes": [name]}]}

    A node that is "catching up" has wrong Services that changed less than --sync-period ago. Keys may be added.
    """
    ordered = sorted(results, key=lambda it: _natural(it.node))
    return {
        "apiVersion": API_VERSION,
        "different": any(it.verdict is NodeVerdict.DIFFERS for it in ordered),
        "nodes": [_entry(it) for it in ordered],
        "otherSettings": [
            {**it._asdict(), "nodes": list(it.nodes)}
            for it in other_settings({it.node: it.settings for it in ordered if it.settings})
        ],
    }


def _entry(result: NodeResult) -> Mapping[str, object]:
    return {
        "node": result.node,
        "proxy": result.proxy,
        "pod": result.pod,
        "verdict": result.verdict.value,
        "reason": result.reason,
        "otherProxy": result.other_proxy,
        "staleSince": _time(result.since, "T") or None,
        "wrong": [
            {
                "namespace": it.namespace,
                "name": it.name,
                "differences": [{**one._asdict(), "at": list(one.at)} for one in it.differences],
            }
            for it in result.wrong
        ],
        "quarantined": [{"namespace": it.namespace, "name": it.name} for it in result.quarantined],
        "contested": [{"at": it.at, "services": list(it.services)} for it in result.contested],
        "settings": dict(result.settings),
    }
