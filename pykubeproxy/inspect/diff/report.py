"""The report of `diff`: whether the rules of one or several nodes are the desired ones, and what differs."""

import enum
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import TypeVar

import msgspec

from pykubeproxy.inspect.diff.by_rules import RuleChanges, RulesDifference, compare_rules, rules_difference
from pykubeproxy.inspect.node import NodeState
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.objects import Family, Key, address_and_port
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import GAP, Block, Cell, Heading, Row, Section, Sentence, Table, Tone, Verbatim
from pykubeproxy.rules.difference import own_part
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.wording import counted, listed, natural, one_line, percent, period, tied

_Value = TypeVar("_Value", bound=Hashable)
_HEADER = ("NODE", "PROXY", "VERDICT", "WRONG", "OBJECTS CHANGED")
_CHAINS_HEADER = ("FAMILY", "TABLE", "CHAIN", "CHANGE", "REMOVED", "ADDED")
VERDICTS = {
    PacketVerdict.DROP: "dropped",
    PacketVerdict.REJECT: "rejected",
    PacketVerdict.PASS: "not redirected",
}
# How many nodes, addresses of a Service, and Services a paragraph names.
_NODES, _PLACES = 8, 5
_LIMITS = {False: 20, True: None}


class NodeVerdict(enum.Enum):
    """Whether the rules of a node follow the objects.

    `CATCHING_UP`: some do not, but their objects changed a moment ago.
    """

    FOLLOWS = "follows"
    CATCHING_UP = "catching up"
    DIFFERS = "differs"
    NOT_COMPARED = "not compared"


_TONES: Mapping[NodeVerdict, Tone] = {
    NodeVerdict.FOLLOWS: "good",
    NodeVerdict.CATCHING_UP: "warning",
    NodeVerdict.DIFFERS: "bad",
    NodeVerdict.NOT_COMPARED: "warning",
}


class MeaningDifference(msgspec.Struct, frozen=True, order=True, rename="camel"):
    """What clients of a port get instead of what they should get.

    - `at`: where clients connect to: "ip:port" or "node port 30080"
    - `origin`: which clients: "the node" or "elsewhere"; "" for both
    - `text`: such as "1 endpoint missing: 10.244.1.5:8080"
    """

    port: str
    at: tuple[str, ...]
    origin: str
    text: str


class WrongService(msgspec.Struct, frozen=True, order=True, rename="camel"):
    """A Service for which packets do not get what they should get."""

    namespace: str
    name: str
    differences: tuple[MeaningDifference, ...]

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)


class Contested(msgspec.Struct, frozen=True, order=True, rename="camel"):
    """An address and port that several Services have. kube-proxy sends packets to any one of them.

    - `at`: "ip:port"
    - `services`: "namespace/name" of each
    """

    at: str
    services: tuple[str, ...]


class KeptAffinity(msgspec.Struct, frozen=True, rename="camel"):
    """Where the next connections of a client go.

    - `endpoint`: "ip:port"
    - `seconds`: for how long
    """

    endpoint: str
    seconds: int


class ClientOutcome(msgspec.Struct, frozen=True, rename="camel"):
    """What may happen to a packet.

    - `verdict`: "dnat", "reject", "drop" or "pass"
    - `endpoint`: "ip:port"; null without one
    - `probability`: 0 to 1
    - `masquerade`: the endpoint sees an address of the node
    - `accepted`: a rule accepts the packet in FORWARD; null if that does not count
    """

    verdict: PacketVerdict
    endpoint: str | None
    probability: float
    masquerade: bool
    accepted: bool | None
    affinity: tuple[KeptAffinity, ...]

    def words(self, *, with_accepted: bool) -> str:
        """Return text such as "10.244.1.5:8080 50%, masqueraded"."""
        parts = [self.endpoint or VERDICTS[self.verdict]]
        if self.probability < 1:
            parts[0] += f" {percent(self.probability)}"
        if self.masquerade:
            parts.append("masqueraded")
        if with_accepted and self.accepted is not None and self.endpoint:
            parts.append("accepted by KUBE-FORWARD" if self.accepted else "not accepted by KUBE-FORWARD")
        for kept in self.affinity:
            to = "" if kept.endpoint == self.endpoint else f" to {kept.endpoint}"
            parts.append(f"affinity{to} for {period(kept.seconds)}")
        return ", ".join(parts)


class ClientDifference(msgspec.Struct, frozen=True, rename="camel"):
    """What clients get at an address of a Service, before and after.

    - `service`: "namespace/name:port"; null if unknown
    - `protocol`, `address`, `port`: where clients connect to
    - `origin`: "node" or "elsewhere"
    - `interface`: by which packets come in; "" for any other than those of other entries
    - `clients`: their addresses, networks or "first-last"
    - `title`: the clients in words, such as "elsewhere except 10.0.0.0/8"
    - `endpoints_only`: each of them is an endpoint of the Service, which is masqueraded when it reaches itself
    - `before`, `after`: what may happen to their packets on that side of the node; several if chance decides
    """

    service: str | None
    protocol: str
    address: str
    port: int
    origin: str
    interface: str
    clients: tuple[str, ...]
    title: str
    endpoints_only: bool
    before: tuple[ClientOutcome, ...]
    after: tuple[ClientOutcome, ...]


class NodeResult(msgspec.Struct, frozen=True, rename="camel"):
    """Whether the rules of a node are the desired ones, and what differs.

    - `node`: its name; null if the rules do not tell it
    - `verdict`: "follows", "catching up", "differs" or "not compared"; a node is "catching up" if Services are wrong that
      changed less than --sync-period ago
    - `before`, `after`: the names of both sides, such as "live rules (nft)"; null for nodes of a cluster
    - `proxy`: such as "kube-proxy v1.35.1"; null if unknown
    - `pod`: its pod, or the one that was asked, as NAMESPACE/NAME; null if unknown
    - `reason`: why it is not compared, or which rules it lacks altogether; else null
    - `other_proxy`: no fault is the cause: its proxy does not write such rules
    - `objects_changed`: when the objects of its wrong Services last changed; null if unknown. Somebody may have changed its
      rules later
    - `wrong`: Services for which packets get something else, sorted
    - `quarantined`: "namespace/name" of Services that its agent quarantined; not listed in `wrong`
    - `contested`: addresses claimed by several Services, of which kube-proxy serves any one
    - `settings`: those that its rules show, by name
    - `clients`: what each group of clients gets instead; null if many nodes are compared, or their rules
    - `rules`: how its rules differ as text; null if nodes are compared by what packets get
    """

    node: str | None
    verdict: NodeVerdict
    before: str | None = None
    after: str | None = None
    proxy: str | None = None
    pod: str | None = None
    reason: str | None = None
    other_proxy: bool = False
    objects_changed: datetime | None = None
    wrong: tuple[WrongService, ...] = ()
    quarantined: tuple[str, ...] = ()
    contested: tuple[Contested, ...] = ()
    settings: Mapping[str, str] = {}
    clients: tuple[ClientDifference, ...] | None = None
    rules: RulesDifference | None = None

    @property
    def name(self) -> str:
        return self.node or ""


class OtherSetting(msgspec.Struct, frozen=True, rename="camel"):
    """A setting that some nodes have with another value than most nodes.

    - `value`: the value on a few nodes
    - `usual`: the value on most nodes
    - `nodes`: the names of the few
    """

    name: str
    value: str
    usual: str
    nodes: tuple[str, ...]


class DiffReport(Report, frozen=True, kw_only=True):
    """Whether the rules of nodes are the desired ones.

    - `different`: the rules of a node differ
    - `nodes`: ordered by name
    - `other_settings`: settings that some nodes have with another value than most nodes
    """

    different: bool
    nodes: Sequence[NodeResult]
    other_settings: Sequence[OtherSetting]

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return a row for each node of a cluster, then what is wrong on which nodes.

        `wide` lists everything, with the pod and the settings of each proxy, and the chains that differ.
        """
        in_cluster = any(node.before is None for node in self.nodes) or not self.nodes
        if in_cluster or wide:
            header = (*_HEADER, *(["POD"] if wide else []))
            yield Table([_row(result, wide=wide) for result in self.nodes], header, right=frozenset((3,)))
            yield GAP
        for paragraph in (
            *_reasons(self.nodes),
            *_wrong(self.nodes, _LIMITS[wide]),
            *_quarantined(self.nodes, _LIMITS[wide]),
            *_contested(self.nodes),
            *(_setting(setting) for setting in self.other_settings),
        ):
            yield paragraph
            yield GAP
        for node in self.nodes:
            yield from _details(node, several=len(self.nodes) > 1, wide=wide)
        if in_cluster:
            yield Sentence(_summary(self.nodes))

    def names(self) -> Iterator[str]:
        """Return the nodes of a cluster that differ; of one node alone, the service ports or Services that differ."""
        for node in self.nodes:
            if node.before is None:
                yield from [f"node/{node.node}"] if node.verdict is NodeVerdict.DIFFERS else []
                continue
            ports = node.rules.ports if node.rules else ()
            titles = (f"{port.namespace}/{port.name}{f':{port.port}' if port.port else ''}" for port in ports)
            yield from dict.fromkeys(
                f"svc/{title}" for title in (*titles, *map(str, (w.key for w in node.wrong)))
            )


def rule_changes(state: NodeState, desired: Mapping[Family, Ruleset]) -> Sequence[RuleChanges]:
    """Compare the texts of the rules of a node with those that it should have."""
    return [
        compare_rules(own_part(node_rules.ruleset, desired[family]), desired[family])
        for family, node_rules in state.rules.items()
    ]


def rules_result(state: NodeState, changes: Sequence[RuleChanges], before: str, after: str) -> NodeResult:
    """Return the result for a node whose rules were compared as text; `before` and `after` name both sides."""
    origin = state.origin
    return NodeResult(
        state.name or None,
        NodeVerdict.DIFFERS if any(change.chains for change in changes) else NodeVerdict.FOLLOWS,
        before,
        after,
        origin.proxy or None,
        origin.pod or None,
        rules=rules_difference(changes),
    )


def diff_report(results: Iterable[NodeResult]) -> DiffReport:
    """Return the report of nodes in any order."""
    ordered = sorted(results, key=lambda result: natural(result.name))
    return DiffReport(
        different=any(result.verdict is NodeVerdict.DIFFERS for result in ordered),
        nodes=ordered,
        other_settings=other_settings(
            {result.name: result.settings for result in ordered if result.settings}
        ),
    )


def other_settings(nodes: Mapping[str, Mapping[str, str]]) -> tuple[OtherSetting, ...]:
    """Return the settings with values that fewer nodes have than another value."""
    values: dict[str, dict[str, list[str]]] = {}
    for node, settings in nodes.items():
        for name, value in settings.items():
            values.setdefault(name, {}).setdefault(value, []).append(node)
    return tuple(_unusual(values))


def _unusual(values: Mapping[str, Mapping[str, list[str]]]) -> Iterable[OtherSetting]:
    for name, by_value in values.items():
        usual = Counter({value: len(nodes) for value, nodes in by_value.items()}).most_common(1)[0][0]
        for value, nodes in by_value.items():
            if value != usual:
                yield OtherSetting(name, value, usual, tuple(nodes))


def _row(result: NodeResult, *, wide: bool) -> Row:
    compared = result.verdict is not NodeVerdict.NOT_COMPARED
    ports = result.rules.ports if result.rules else ()
    services = {(port.namespace, port.name) for port in ports} or result.wrong
    wrong = "all" if compared and result.reason else str(len(services)) if compared else ""
    changed = f"{result.objects_changed:%Y-%m-%d %H:%M:%S}Z" if result.objects_changed else ""
    verdict = Cell(result.verdict.value, _TONES[result.verdict])
    cells = (one_line(result.name), one_line(result.proxy or ""), verdict, wrong, changed)
    if not wide:
        return Row(cells)
    settings = ", ".join(tied(f"{name} {value}") for name, value in result.settings.items())
    return Row((*cells, result.pod or ""), below=[Sentence(settings, start="settings: ")] if settings else ())


def _nodes_by(
    results: Sequence[NodeResult], values: Callable[[NodeResult], Iterable[_Value]]
) -> Mapping[_Value, Sequence[str]]:
    """Return the names of the nodes that have a value in common."""
    nodes: dict[_Value, list[str]] = {}
    for result in results:
        for value in values(result):
            nodes.setdefault(value, []).append(result.name)
    return nodes


def _reasons(results: Sequence[NodeResult]) -> Iterator[Block]:
    for reason, names in _nodes_by(results, lambda result: filter(None, [result.reason])).items():
        yield Sentence(f"{_start(names)}{reason}")


def _wrong(results: Sequence[NodeResult], most: int | None) -> Iterator[Block]:
    """Yield a section for the Services that are wrong in the same way on the same nodes."""
    services: dict[tuple[str, ...], list[WrongService]] = {}
    for service, names in _nodes_by(results, lambda result: result.wrong).items():
        services.setdefault(tuple(names), []).append(service)
    for places, some in sorted(services.items(), key=lambda item: -len(item[0])):
        title = f"{_start(places)}{counted(len(some), 'wrong Service')}"
        yield Section(Heading(title), [*map(Sentence, _lines(some, most))])


def _lines(services: Sequence[WrongService], most: int | None) -> Iterator[str]:
    for service in sorted(services)[:most]:
        for difference in service.differences:
            title = f"{service.key}:{difference.port}" if difference.port else str(service.key)
            origin = f" from {difference.origin}" if difference.origin else ""
            yield f"{title} at {listed(difference.at, _PLACES)}{origin}: {difference.text}"
    if most is not None and len(services) > most:
        yield f"and {counted(len(services) - most, 'more Service')}"


def _quarantined(results: Sequence[NodeResult], most: int | None) -> Iterator[Block]:
    for services, names in _nodes_by(results, lambda result: filter(None, [result.quarantined])).items():
        where = f" --node {names[0]}" if names[0] else ""
        yield Sentence(
            f"{_start(names)}{counted(len(services), 'quarantined Service')}, not served: {listed(services, most)};"
            f" `kubectl pykubeproxy status{where} -o json` has the reason"
        )


def _contested(results: Sequence[NodeResult]) -> Iterator[Block]:
    for one, names in sorted(_nodes_by(results, lambda result: result.contested).items()):
        services = listed(one.services, _PLACES)
        yield Sentence(f"{_start(names)}{one.at} belongs to {services}; kube-proxy serves any one of them")


def _setting(other: OtherSetting) -> Block:
    return Sentence(f"{_start(other.nodes)}{other.name} is {other.value}, but {other.usual} on most nodes")


def _details(node: NodeResult, *, several: bool, wide: bool) -> Iterator[Block]:
    """Yield what differs for each group of clients, or in the rules."""
    if node.clients:
        if several:
            yield Heading(f"{node.node}:")
        if node.before is not None:
            yield Verbatim(f"- {node.before}")
            yield Verbatim(f"+ {node.after}")
            yield GAP
        yield from client_blocks(node.clients)
        yield GAP
    for family, sentences in (node.rules.families if node.rules else {}).items():
        title = Verbatim(f"{family.value}: {node.before} → {node.after}", "title")
        yield Section(title, [*map(Sentence, sentences)])
        yield GAP
    if wide and node.rules and node.rules.chains:
        rows = [
            Row(
                (
                    one.family.value,
                    one.table,
                    one.chain,
                    one.change,
                    str(len(one.removed)),
                    str(len(one.added)),
                )
            )
            for one in node.rules.chains
        ]
        yield Table(rows, _CHAINS_HEADER, frozenset((4, 5)))


def _summary(results: Sequence[NodeResult]) -> str:
    counts = [
        f"{number} {verdict.value if number == 1 else verdict.value.removesuffix('s')}"
        for verdict in NodeVerdict
        if (number := sum(result.verdict is verdict for result in results))
    ]
    return f"{counted(len(results), 'node')}: {', '.join(counts) or 'none'}."


def _start(names: Sequence[str]) -> str:
    """Return text such as "node1 and node2: ", "" for a node without a name."""
    return f"{listed(filter(None, names), _NODES)}: " if any(names) else ""


def destination_title(protocol: str, address: str, port: int) -> str:
    """Return text such as "10.96.0.10:80" or "10.96.0.10:53 UDP"."""
    at = address_and_port(address, port)
    return at if protocol == "TCP" else f"{at} {protocol}"


def client_blocks(differences: Iterable[ClientDifference]) -> Iterator[Block]:
    """Yield a section for each destination: what its clients got before, and get after."""
    for (service, *to), group in groupby(
        differences,
        lambda difference: (difference.service, difference.protocol, difference.address, difference.port),
    ):
        at = destination_title(*to)
        clients: dict[tuple[str, ...], list[str]] = {}
        for origin in groupby(group, lambda difference: (difference.origin, difference.interface)):
            some = list(origin[1])
            # An endpoint as its own client gets the same as others, masqueraded.
            for difference in [one for one in some if not one.endpoints_only] or some:
                clients.setdefault(tuple(_differing_lines(difference)), []).append(difference.title)
        yield Section(
            Heading(f"{service} at {at}" if service else at),
            [
                Section(
                    Heading(f"from {listed(names)}", ""),
                    [Verbatim(line, "bad" if line[0] == "-" else "good") for line in lines],
                )
                for lines, names in clients.items()
            ],
        )


def _differing_lines(difference: ClientDifference) -> Iterator[str]:
    # What only another policy of FORWARD would show counts only if nothing else differs.
    for with_accepted in (False, True):
        old, new = (
            [one.words(with_accepted=with_accepted) for one in some]
            for some in (difference.before, difference.after)
        )
        if sorted(old) != sorted(new):
            break
    yield from (f"- {line}" for line in sorted(old) if line not in new)
    yield from (f"+ {line}" for line in sorted(new) if line not in old)
