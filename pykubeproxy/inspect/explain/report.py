"""The report of `explain`: which endpoints a Service uses on one or several nodes, and why."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from pykubeproxy.inspect.explain.model import (
    ExplainedEndpoint,
    ExplainedGroup,
    ExplainedNode,
    ExplainedPolicy,
    Explanation,
    PortExplanation,
    RulesAgreement,
    explained_nodes,
    word,
)
from pykubeproxy.inspect.explain.notes import notes, service_notes, summary
from pykubeproxy.inspect.explain.sentences import skip_message, topology_message
from pykubeproxy.objects import Family, Node
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import GAP, Block, Heading, Row, Section, Sentence, Table
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import Reason
from pykubeproxy.wording import counted, listed, percent

# How many nodes a title names, and how many groups of nodes and endpoints are listed.
_NODES, _GROUPS, _ENDPOINTS = 4, 12, 20
# Of endpoints with all that is known about them.
_HEADER = ("SHARE", "ENDPOINT", "NODE", "ZONE", "POD", "REASON")

# The reasons for which an agent does not serve service ports.
Quarantined = Mapping[tuple[Family, PortName], str]


class SkippedEntry(msgspec.Struct, frozen=True, rename="camel"):
    """An entry of an EndpointSlice that is no endpoint.

    - `slice`: the name of the EndpointSlice
    - `address`: null for the whole slice or a port of it
    - `reason`: such as "invalid-address"
    - `message`: the reason as a phrase
    """

    slice: str
    address: str | None
    reason: str
    message: str


class ExplainedPort(msgspec.Struct, frozen=True, rename="camel"):
    """A service port in one family.

    - `policies`: Cluster, Local or both, as the port has frontends under them
    - `skipped`: the entries of EndpointSlices that are no endpoints
    - `affinity_seconds`: how long a client keeps its endpoint; null without session affinity
    - `source_ranges`: the networks to which the load balancer is open; null for all
    - `health_check_node_port`: null without one
    - `quarantined`: it is not served, in quarantine
    - `destinations`: sentences about where its addresses lead
    - `notes`: sentences about what else matters
    """

    port: str
    protocol: str
    family: Family
    policies: Sequence[ExplainedPolicy]
    skipped: Sequence[SkippedEntry]
    affinity_seconds: int | None
    source_ranges: Sequence[str] | None
    health_check_node_port: int | None
    quarantined: bool
    destinations: Sequence[str]
    notes: Sequence[str]


class SkippedFamily(msgspec.Struct, frozen=True, rename="camel"):
    """A family in which a Service has no rules.

    - `reason`: such as "headless"
    - `message`: the reason as a phrase
    """

    family: Family
    reason: str
    message: str


class SkippedValue(msgspec.Struct, frozen=True, rename="camel"):
    """A value of a Service that has no effect: invalid, or an address that the agent needs itself.

    - `field`: where it stands, such as "spec.externalIPs"
    - `value`: the value itself
    - `port`: the port to which this applies; null for all
    - `message`: why it has no effect
    """

    field: str
    value: str
    port: int | None
    message: str


class ExplainedService(msgspec.Struct, frozen=True, rename="camel"):
    """A Service, its ports, and what of it has no effect.

    - `notes`: sentences about the Service as a whole
    - `ports`: one entry for each service port and family
    """

    namespace: str
    name: str
    notes: Sequence[str]
    skipped_families: Sequence[SkippedFamily]
    skipped_values: Sequence[SkippedValue]
    ports: Sequence[ExplainedPort]


class ExplainReport(Report, frozen=True, kw_only=True):
    """Which endpoints Services use, and why.

    - `nodes`: those for which it is explained
    - `services`: the matching Services
    - `rules`: whether the rules of nodes agree, as far as they were read
    """

    nodes: Sequence[ExplainedNode]
    services: Sequence[ExplainedService]
    rules: Sequence[RulesAgreement] = ()

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return a part for each service port; `wide` lists everything, with the places of endpoints."""
        if len(self.nodes) == 1:
            yield Heading("On ", "", f"{self.nodes[0].title}:")
            yield GAP
        for service in self.services:
            title = f"{service.namespace}/{service.name}"
            if service.notes or not service.ports:
                yield Section(Heading(title), [*map(Sentence, service.notes)])
                yield GAP
            for port in service.ports:
                name = f"{title}:{port.port}" if port.port else title
                heading = Heading(name, "title", f"  {port.protocol} {port.family.value}")
                yield Section(heading, list(_port_blocks(port, len(self.nodes), wide)))
                yield GAP
        for compared in self.rules:
            yield from _rules_blocks(compared)

    def names(self) -> Iterator[str]:
        """Return the service ports, in a form that commands take."""
        return iter(
            dict.fromkeys(
                f"svc/{service.namespace}/{service.name}{f':{port.port}' if port.port else ''}"
                for service in self.services
                for port in service.ports
            )
        )


def explain_report(
    services: Iterable[Explanation],
    nodes: Iterable[Node],
    rules: Sequence[RulesAgreement] = (),
    *,
    quarantined: Quarantined | None = None,
    settings_known: bool = True,
    more_notes: Callable[[PortExplanation], Iterable[str]] = lambda _: (),
) -> ExplainReport:
    """Return the report of explained Services. Without known settings, notes that depend on them are left out.

    `more_notes` returns what else is known about a port.
    """
    return ExplainReport(
        nodes=explained_nodes(nodes),
        services=[_service(service, quarantined or {}, settings_known, more_notes) for service in services],
        rules=rules,
    )


def _service(
    explanation: Explanation,
    quarantined: Quarantined,
    settings_known: bool,
    more_notes: Callable[[PortExplanation], Iterable[str]],
) -> ExplainedService:
    return ExplainedService(
        namespace=explanation.service.namespace,
        name=explanation.service.name,
        notes=[*service_notes(explanation)],
        skipped_families=[
            SkippedFamily(family, word(reason), reason.value)
            for family, reason in explanation.skipped.items()
        ],
        skipped_values=[*_skipped_values(explanation)],
        ports=[_port(port, quarantined, settings_known, more_notes(port)) for port in explanation.ports],
    )


def _skipped_values(explanation: Explanation) -> Iterator[SkippedValue]:
    service = explanation.service
    for rejected in service.rejected:
        yield SkippedValue(rejected.field, str(rejected.value), None, rejected.reason)
    for port in (port_explanation.port for port_explanation in explanation.ports):
        for ip, reason in port.skipped_ips:
            field = "spec.externalIPs" if ip in service.external_ips else "status.loadBalancer.ingress"
            yield SkippedValue(field, ip, port.port, reason.value)


def _port(
    port: PortExplanation, quarantined: Quarantined, settings_known: bool, more_notes: Iterable[str]
) -> ExplainedPort:
    reason = quarantined.get((port.family, port.name), "")
    return ExplainedPort(
        port=port.name.port,
        protocol=port.name.protocol,
        family=port.family,
        policies=port.policies,
        skipped=[
            SkippedEntry(
                skipped.slice_name, skipped.address or None, word(skipped.reason), skip_message(skipped)
            )
            for skipped in port.skipped
        ],
        affinity_seconds=port.port.affinity_seconds,
        source_ranges=port.port.source_ranges,
        health_check_node_port=port.port.health_check_node_port or None,
        quarantined=bool(reason),
        destinations=[*summary(port, reason, settings_known=settings_known)],
        notes=[*notes(port, settings_known=settings_known), *more_notes],
    )


def _port_blocks(port: ExplainedPort, nodes: int, wide: bool) -> Iterator[Block]:
    yield from map(Sentence, port.destinations)
    for policy in port.policies:
        chain = f", chain {policy.chain}" if policy.chain else ""
        heading = Heading(f"Policy {policy.policy.value}{chain}", "")
        yield Section(heading, list(_policy_blocks(policy, nodes, wide)))
    if port.skipped:
        yield Section(Heading("Skipped", ""), [Sentence(skipped.message) for skipped in port.skipped])
    yield from map(Sentence, port.notes)


def _policy_blocks(policy: ExplainedPolicy, nodes: int, wide: bool) -> Iterator[Block]:
    serving = [group for group in policy.groups if group.serves]
    shown = serving if wide else serving[:_GROUPS]
    yield from (block for group in shown for block in _titled_group(group, nodes, wide))
    if left := sum(len(group.nodes) for group in serving[len(shown) :]):
        count = counted(left, "more node")
        yield Sentence(f"and {count} with other endpoints (--node shows one, -o wide all)")
    for group in policy.groups[len(serving) :]:
        yield from _titled_group(group, nodes, wide)


def _titled_group(group: ExplainedGroup, nodes: int, wide: bool) -> Iterable[Block]:
    blocks = list(_group_blocks(group, nodes, wide))
    return blocks if nodes == 1 else [Section(Heading(f"On {_names(group.nodes, nodes)}:", ""), blocks)]


def _group_blocks(group: ExplainedGroup, nodes: int, wide: bool) -> Iterator[Block]:
    if group.message:
        yield Sentence(group.message, "warning")
    yield from (Sentence(hint.message) for hint in group.ignored_hints)
    if sentence := topology_message(group.topology):
        yield Sentence(sentence)
    several = nodes > 1
    far = word(Reason.NOT_LOCAL)
    some = [endpoint for endpoint in group.endpoints if wide or not several or endpoint.reason != far]
    listed_ones = some if wide or not several else _first_endpoints(some)
    rows = [_wide_row(one) if wide else _endpoint_row(one) for one in listed_ones]
    yield Table(rows, _HEADER if wide and rows else (), right=frozenset((0,)))
    for used in (True, False):
        hidden = [endpoint for endpoint in some if endpoint.used is used and endpoint not in listed_ones]
        if hidden:
            share = f", with {percent(sum(endpoint.share for endpoint in hidden))}" if used else ", not used"
            yield Sentence(f"and {counted(len(hidden), 'more endpoint')}{share} (-o wide lists all)")
    if group.serves and (left := len(group.endpoints) - len(some)):
        yield Sentence(f"{counted(left, 'endpoint')} on other nodes")


def _first_endpoints(endpoints: Sequence[ExplainedEndpoint]) -> Sequence[ExplainedEndpoint]:
    """Return the first of the used endpoints, and the first of the others."""
    return [
        endpoint
        for used in (True, False)
        for endpoint in [one for one in endpoints if one.used is used][:_ENDPOINTS]
    ]


def _endpoint_row(one: ExplainedEndpoint) -> Row:
    where = f"on {one.node}" if one.node else ""
    pod = f"({one.pod})" if one.pod else ""
    place = " ".join(filter(None, (where, pod)))
    message = f"{place}: {one.message}" if place else one.message
    return Row((_share(one), one.target, message))


def _wide_row(one: ExplainedEndpoint) -> Row:
    return Row((_share(one), one.target, one.node, one.zone, one.pod, one.message))


def _share(one: ExplainedEndpoint) -> str:
    return f"{percent(one.share) if one.used else '-':>4}"


def _names(nodes: Sequence[ExplainedNode], all_nodes: int) -> str:
    """Return text such as "node1 in zone-a", "every node (200)" or "node1, node2 and 198 more nodes"."""
    if len(nodes) == all_nodes > 2:
        return f"every node ({all_nodes})"
    if len(nodes) <= 2:
        return listed(node.title for node in nodes)
    return f"{listed([node.name for node in nodes], _NODES)}{' nodes' if len(nodes) > _NODES else ''}"


def _rules_blocks(compared: RulesAgreement) -> Iterator[Block]:
    if compared.agree is None:
        yield Sentence(f"The rules of {compared.node} are unknown: {compared.unread}")
    elif compared.agree:
        yield Sentence(f"The rules of {compared.node} agree.", "good")
    else:
        yield Section(
            Heading(f"The rules of {compared.node} differ:", "bad"), [*map(Sentence, compared.differences)]
        )
        yield Sentence(f"Next: kubectl pykubeproxy diff --node {compared.node}")
