"""The report of `dump-rules`: the services in the rules of one or several nodes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from pykubeproxy.inspect.dump.model import EndpointView, ServiceView, in_order, node_views
from pykubeproxy.inspect.node import NodeState, UnknownNode
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.objects import address_and_port
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import GAP, Block, Cell, Heading, Row, Section, Table
from pykubeproxy.wording import counted, percent, period, tied

_REJECTIONS = {
    PacketVerdict.REJECT: "rejected: no endpoints",
    PacketVerdict.DROP: "dropped: no endpoints on this node",
    PacketVerdict.PASS: "no endpoints, and no rule that rejects packets",
}
_QUARANTINED = {
    PacketVerdict.REJECT: "rejected: quarantined (`pykubeproxy status` has the reason)",
    PacketVerdict.PASS: "passed on: quarantined (`pykubeproxy status` has the reason)",
}
# Of endpoints with counters.
_HEADER = ("SHARE", "ENDPOINT", "PACKETS", "BYTES", "CHAIN")
# Makes the last cells of an endpoint.
Remark = Callable[[ServiceView, EndpointView], Sequence[str]]


class DumpedNode(msgspec.Struct, frozen=True, rename="camel"):
    """A node and the services in its rules.

    - `node`: its name; null if the rules do not tell it
    - `proxy`: such as "kube-proxy v1.35.1"; null if unknown
    - `pod`: NAMESPACE/NAME of the pod that was asked, or null
    - `remarks`: what the rules do not show, such as a family that could not be read
    - `unread`: why the rules could not be read, and what to do; null if they were
    - `other_proxy`: no fault is the cause: the proxy of the node does not write iptables rules
    - `services`: one entry for each service port, family and policy
    """

    node: str | None
    proxy: str | None = None
    pod: str | None = None
    remarks: Sequence[str] = ()
    unread: str | None = None
    other_proxy: bool = False
    services: tuple[ServiceView, ...] = ()

    @property
    def title(self) -> str:
        """The node with its proxy and pod, "" if neither is known."""
        parts = (f"Node {self.node}", self.proxy, self.pod and f"pod {self.pod}")
        return ", ".join(filter(None, parts)) if self.proxy or self.pod else ""


class DumpReport(Report, frozen=True, kw_only=True):
    """The services in the rules of nodes.

    - `nodes`: ordered by name
    """

    nodes: tuple[DumpedNode, ...]

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return a part for each service port, with a row for each endpoint; `wide` adds bytes and chains."""
        for node in self.nodes:
            if node.unread is None and node.title:
                yield Heading(f"# {node.title}", "part")
            yield from service_blocks(node.services, counters if wide else packets, wide=wide)
            yield GAP

    def names(self) -> Iterator[str]:
        """Return the service ports, in a form that commands take."""
        return iter(dict.fromkeys(f"svc/{service.name}" for node in self.nodes for service in node.services))


def dumped(found: NodeState | UnknownNode, query: ServiceFilter) -> DumpedNode:
    """Return the matching services in the rules of a node. Raises TooManyRules."""
    if isinstance(found, UnknownNode):
        return DumpedNode(
            found.name,
            found.proxy or None,
            found.pod or None,
            unread=found.reason,
            other_proxy=found.by_design,
        )
    services = in_order(view for rules in found.rules.values() for view in node_views(rules, query))
    origin = found.origin
    return DumpedNode(
        found.name or None, origin.proxy or None, origin.pod or None, found.remarks, services=services
    )


def packets(_: ServiceView, endpoint: EndpointView) -> Sequence[str]:
    """Return how many packets an endpoint got; "" for none."""
    return (counted(endpoint.packets, "packet") if endpoint.packets else "",)


def counters(_: ServiceView, endpoint: EndpointView) -> Sequence[str]:
    """Return the packets and bytes an endpoint got, and its chain."""
    return str(endpoint.packets), str(endpoint.bytes), endpoint.chain


def rates(before: Iterable[ServiceView], seconds: float) -> Remark:
    """Return a remark with new connections per second since earlier views; "" for none.

    Both policies count together. A chain that was rewritten in between counts from then on.
    """
    old = {_key(view, endpoint): endpoint.packets for view in before for endpoint in view.endpoints}

    def rate(view: ServiceView, endpoint: EndpointView) -> Sequence[str]:
        known = old.get(_key(view, endpoint), 0)
        new = endpoint.packets - known if endpoint.packets >= known else endpoint.packets
        return (f"{new / seconds:8.1f}/s" if new else "",)

    return rate


def service_blocks(
    services: Iterable[ServiceView], remark: Remark = packets, *, wide: bool = False
) -> Iterator[Block]:
    """Yield a section for each service port of sorted views."""
    found = list(services)
    families = len({view.family for view in found}) > 1
    for name, group in groupby(found, lambda view: (view.name, view.family.value)):
        yield _port(*name, list(group), remark, families, wide)
        yield GAP


def rejection(view: ServiceView) -> str:
    """Return what happens to the packets of a service port without endpoints, and why."""
    return (_QUARANTINED if view.quarantined else _REJECTIONS)[view.verdict]


def open_to(source_ranges: Sequence[str] | None) -> str:
    """Return which clients may use load balancer IPs."""
    return "all" if source_ranges is None else ", ".join(source_ranges) or "nobody"


def _key(view: ServiceView, endpoint: EndpointView) -> tuple[object, ...]:
    return view.name, view.family, view.policy, endpoint.address, endpoint.port


def _port(
    name: object,
    family: str,
    some: Sequence[ServiceView],
    remark: Remark,
    families: bool,
    wide: bool,
) -> Section:
    first = some[0]
    title = str(name) if first.namespace else f"unknown service ({first.service})"
    rest = " ".join(filter(None, (first.protocol, family if families else "")))
    tables = (table for view in some for table in _policy(view, remark, wide))
    return Section(Heading(title, "title", f"  {rest}"), list(tables))


def _policy(view: ServiceView, remark: Remark, wide: bool) -> Iterator[Table]:
    facts: list[str | Cell] = [*_facts(view)]
    if view.verdict is not PacketVerdict.DNAT:
        facts.append(Cell(rejection(view), "warning"))
    if wide and view.chain:
        facts.append(f"chain {view.chain}")
    policy = f"{view.policy.value:<7}"
    yield Table([Row(("" if number else policy, fact)) for number, fact in enumerate(facts)])
    if view.endpoints:
        yield Table(
            [_endpoint(view, endpoint, remark) for endpoint in view.endpoints],
            _HEADER if wide else (),
            frozenset((0, 2, 3) if wide else (0,)),
        )


def _facts(view: ServiceView) -> Iterator[str]:
    if view.frontends:
        yield ", ".join(tied(str(frontend)) for frontend in view.frontends)
    if view.from_this_node:
        frontends = ", ".join(tied(str(frontend)) for frontend in view.from_this_node)
        yield f"from this node and its pods: {frontends}"
    if view.source_ranges is not None:
        yield f"load balancer open to {open_to(view.source_ranges)}"
    if view.affinity_seconds is not None:
        yield f"session affinity for {period(view.affinity_seconds)}"
    if view.health_check_node_port:
        yield f"health check at node port {view.health_check_node_port}"


def _endpoint(view: ServiceView, endpoint: EndpointView, remark: Remark) -> Row:
    share = f"{percent(endpoint.share):>7}"
    return Row((share, address_and_port(endpoint.address, endpoint.port), *remark(view, endpoint)))
