"""The table and the JSON document of `pykubeproxy dump-rules`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.dump.model import EndpointView, ServiceView
from pykubeproxy.inspect.render_json import port_entry, rounded
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.objects import address_and_port
from pykubeproxy.services.ports import PortName
from pykubeproxy.wording import WIDTH, SafeText, counted, percent, period, styled, text_of, tied, wrapped

_INDENT = " " * 11
_REJECTIONS = {
    PacketVerdict.REJECT: "rejected: no endpoints",
    PacketVerdict.DROP: "dropped: no endpoints on this node",
    PacketVerdict.PASS: "no endpoints, and no rule that rejects packets",
}
_QUARANTINED = {
    PacketVerdict.REJECT: "rejected: quarantined (`pykubeproxy status` has the reason)",
    PacketVerdict.PASS: "passed on: quarantined (`pykubeproxy status` has the reason)",
}
# Makes the last column of an endpoint.
Remark = Callable[[ServiceView, EndpointView], str]


def packets(_: ServiceView, endpoint: EndpointView) -> str:
    """Return how many packets an endpoint got; "" for none."""
    return counted(endpoint.packets, "packet") if endpoint.packets else ""


def counters(_: ServiceView, endpoint: EndpointView) -> str:
    """Return the packets and bytes an endpoint got, and its chain."""
    return f"{endpoint.packets:>9} packets {endpoint.bytes:>12} bytes  {endpoint.chain}"


def rates(before: Iterable[ServiceView], seconds: float) -> Remark:
    """Return a remark with new connections per second since earlier views; "" for none.

    Both policies count together. A chain that was rewritten in between counts from then on.
    """
    old = {_key(view, endpoint): endpoint.packets for view in before for endpoint in view.endpoints}

    def rate(view: ServiceView, endpoint: EndpointView) -> str:
        known = old.get(_key(view, endpoint), 0)
        new = endpoint.packets - known if endpoint.packets >= known else endpoint.packets
        return f"{new / seconds:8.1f}/s" if new else ""

    return rate


def _key(view: ServiceView, endpoint: EndpointView) -> tuple[object, ...]:
    return view.name, view.family, view.policy, endpoint.address, endpoint.port


def table(views: Sequence[ServiceView], remark: Remark = packets, with_chains: bool = False) -> SafeText:
    """Return sorted views as a table of 80 columns, or more with long remarks."""
    families = len({view.family for view in views}) > 1
    return text_of(
        *(
            _port(name, family if families else "", list(group), remark, with_chains)
            for (name, family), group in groupby(views, lambda view: (view.name, view.family.value))
        )
    )


def _port(
    name: PortName, family: str, views: Iterable[ServiceView], remark: Remark, with_chains: bool
) -> Iterator[str]:
    title = str(name) if name.namespace else f"unknown service ({name.service})"
    yield f"{styled(title, bold=True)}  {' '.join(filter(None, (name.protocol, family)))}"
    for view in views:
        yield from _policy(view, remark, with_chains)


def _policy(view: ServiceView, remark: Remark, with_chains: bool) -> Iterable[str]:
    start = f"  {view.policy.value:<7}  "
    for text in _facts(view):
        for line in wrapped(text, width=WIDTH - len(_INDENT)):
            yield start + line
            start = _INDENT
    if view.verdict is not PacketVerdict.DNAT:
        yield _INDENT + styled(rejection(view), "yellow")
    longest = max((len(address_and_port(e.address, e.port)) for e in view.endpoints), default=0)
    if with_chains and view.chain:
        yield f"{_INDENT}chain {view.chain}"
    yield from (_endpoint(endpoint, longest, remark(view, endpoint)) for endpoint in view.endpoints)


def rejection(view: ServiceView) -> str:
    """Return what happens to the packets of a service port without endpoints, and why."""
    return (_QUARANTINED if view.quarantined else _REJECTIONS)[view.verdict]


def open_to(source_ranges: Sequence[str] | None) -> str:
    """Return which clients may use load balancer IPs."""
    return "all" if source_ranges is None else ", ".join(source_ranges) or "nobody"


def _facts(view: ServiceView) -> Iterable[str]:
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


def _endpoint(endpoint: EndpointView, width: int, remark: str) -> str:
    at = address_and_port(endpoint.address, endpoint.port)
    return f"{percent(endpoint.share):>{len(_INDENT) - 2}}  {at:<{width}}  {remark}".rstrip()


def document(views: Iterable[ServiceView]) -> dict[str, object]:
    """The services in the live rules as a document for JSON or YAML, of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1", "services": [{
      "namespace", "name": "" and the chain's name if the Service is unknown,
      "port": the port's name, "" if it has none, "protocol": "TCP"|"UDP"|"SCTP",
      "family": "IPv4"|"IPv6", "policy": "Cluster"|"Local",
      "verdict": "dnat" with endpoints, else "reject"|"drop"|"pass",
      "frontends": [{"kind": "cluster-ip"|"external-ip"|"load-balancer-ip"|"node-port",
                     "address": an IP, or "*" for a node port at all addresses of the node, "port": number}],
      "fromThisNode": frontends that lead here only for packets of this node and its pods,
      "endpoints": [{"address", "port", "share": 0 to 1, "packets", "bytes"}],
      "affinitySeconds": number or null, "sourceRanges": [CIDR] or null for all, "healthCheckNodePort": number or null,
      "quarantined": true if it is not served, in quarantine}]}

    There is one entry for each service port, family and policy. Packets and bytes count since the endpoint's chain was
    written, for both policies together. Keys may be added.
    """
    return {"apiVersion": API_VERSION, "services": [_service(view) for view in views]}


def _service(view: ServiceView) -> dict[str, object]:
    return {
        **port_entry(view.name),
        "family": view.family.value,
        "policy": view.policy.value,
        "verdict": view.verdict.value,
        "frontends": msgspec.to_builtins(view.frontends),
        "fromThisNode": msgspec.to_builtins(view.from_this_node),
        "endpoints": [
            {
                "address": endpoint.address,
                "port": endpoint.port,
                "share": rounded(endpoint.share),
                "packets": endpoint.packets,
                "bytes": endpoint.bytes,
            }
            for endpoint in view.endpoints
        ],
        "affinitySeconds": view.affinity_seconds,
        "sourceRanges": view.source_ranges,
        "healthCheckNodePort": view.health_check_node_port or None,
        "quarantined": view.quarantined,
    }
