"""Views of services as text: a table for people, and a document for programs."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import click

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.dump import EndpointView, ServiceView, Verdict
from pykubeproxy.inspect.frontends import ANY_LOCAL, Frontend, FrontendKind
from pykubeproxy.objects import address_and_port
from pykubeproxy.services.ports import PortName

# Columns of a terminal that texts keep to.
WIDTH = 80

_INDENT = " " * 11
# A space at which no line is broken.
TIE = "\N{NO-BREAK SPACE}"
_KINDS = {
    FrontendKind.CLUSTER_IP: "cluster IP",
    FrontendKind.EXTERNAL_IP: "external IP",
    FrontendKind.LOAD_BALANCER_IP: "load balancer",
    FrontendKind.NODE_PORT: "node port",
}
REFUSALS = {
    Verdict.REJECT: "refused: no endpoints",
    Verdict.DROP: "dropped: no endpoints on this node",
    Verdict.PASS: "leads nowhere: no endpoints, and no rule that says so",
}
_SET_ASIDE = {
    Verdict.REJECT: "refused: set aside, for iptables refuses its rules",
    Verdict.PASS: "not touched: set aside, for iptables refuses its rules",
}
# What is said about an endpoint of a service, beside its share and address.
Remark = Callable[[ServiceView, EndpointView], str]
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def document(views: Iterable[ServiceView]) -> dict[str, object]:
    """The views as a document for JSON or YAML, of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1", "services": [{
      "namespace", "name": without any trace of them "" and the chain's name,
      "port": the port's name, "" if it has none, "protocol": "TCP"|"UDP"|"SCTP",
      "family": "IPv4"|"IPv6", "policy": "Cluster"|"Local",
      "verdict": "dnat", or "reject"|"drop"|"pass" without endpoints,
      "frontends": [{"kind": "cluster-ip"|"external-ip"|"load-balancer-ip"|"node-port",
                     "address": an IP, or "*" for a node port at all addresses of the node, "port": number}],
      "fromThisNode": frontends which lead here for packets of this node and its pods only,
      "endpoints": [{"address", "port", "share": 0 to 1, "packets", "bytes"}],
      "affinitySeconds": number or null, "sourceRanges": [CIDR], "healthCheckNodePort": number or null,
      "setAside": whether it is not served for iptables refusing its rules}]}

    There is an entry for each service port, family and policy; more keys may be added. Packets and bytes are those of
    an endpoint under both policies, since its chain was written.
    """
    return {"apiVersion": API_VERSION, "services": [_entry(view) for view in views]}


def packets(_: ServiceView, endpoint: EndpointView) -> str:
    """How many packets an endpoint has got, in words; nothing for none."""
    number = endpoint.packets
    return f"{number} packet{'s' * (number != 1)}" if number else ""


def in_full(_: ServiceView, endpoint: EndpointView) -> str:
    """What an endpoint has got, in packets and bytes, and the chain that leads to it."""
    return f"{endpoint.packets:>9} packets {endpoint.bytes:>12} bytes  {endpoint.chain}"


def rates(before: Iterable[ServiceView], seconds: float) -> Remark:
    """How many new connections a second an endpoint has got since an earlier look; nothing for none.

    What both policies send to an endpoint is counted together. A chain that was written anew meanwhile counts from
    there on.
    """
    old = {
        (view.name, view.family, view.policy, endpoint.address, endpoint.port): endpoint.packets
        for view in before
        for endpoint in view.endpoints
    }

    def rate(view: ServiceView, endpoint: EndpointView) -> str:
        key = (view.name, view.family, view.policy, endpoint.address, endpoint.port)
        known = old.get(key, 0)
        new = endpoint.packets - known if endpoint.packets >= known else endpoint.packets
        return f"{new / seconds:8.1f}/s" if new else ""

    return rate


def table(views: Sequence[ServiceView], remark: Remark = packets, with_chains: bool = False) -> str:
    """The views for people, in 80 columns; styled, which click.echo undoes where it is not a terminal.

    `remark` says something about each endpoint, which may take more columns.
    """

    def port(view: ServiceView) -> tuple[PortName, str]:
        return view.name, view.family.value

    families = len({view.family for view in views}) > 1
    parts = [
        _port(name, family if families else "", group, remark, with_chains)
        for (name, family), group in groupby(views, port)
    ]
    return "\n".join(parts)


def in_order(views: Iterable[ServiceView]) -> tuple[ServiceView, ...]:
    """By service port, then family, then policy."""
    return tuple(sorted(views, key=lambda view: (view.name, view.family.value, view.policy.value)))


def _entry(view: ServiceView) -> dict[str, object]:
    return {
        "namespace": view.name.namespace,
        "name": view.name.service,
        "port": view.name.port,
        "protocol": view.name.protocol,
        "family": view.family.value,
        "policy": view.policy.value,
        "verdict": view.verdict.value,
        "frontends": [frontend_entry(frontend) for frontend in view.frontends],
        "fromThisNode": [frontend_entry(frontend) for frontend in view.from_this_node],
        "endpoints": [
            {
                "address": endpoint.address,
                "port": endpoint.port,
                # iptables keeps probabilities in 31 bits: beyond nine digits there is only noise.
                "share": round(endpoint.share, 9),
                "packets": endpoint.packets,
                "bytes": endpoint.bytes,
            }
            for endpoint in view.endpoints
        ],
        "affinitySeconds": view.affinity_seconds,
        "sourceRanges": list(view.source_ranges),
        "healthCheckNodePort": view.health_check_node_port or None,
        "setAside": view.set_aside,
    }


def frontend_entry(frontend: Frontend) -> dict[str, object]:
    """A frontend as part of a document."""
    return {"kind": frontend.kind.value, "address": frontend.address, "port": frontend.port}


def _port(
    name: PortName, family: str, views: Iterable[ServiceView], remark: Remark, with_chains: bool
) -> str:
    """One service port: a headline, then each policy with its frontends and endpoints."""
    title = str(name) if name.namespace else f"unknown service ({name.service})"
    lines = [f"{click.style(title, bold=True)}  {' '.join(filter(None, (name.protocol, family)))}"]
    for view in views:
        lines += _policy(view, remark, with_chains)
    return "".join(f"{line}\n" for line in lines)


def _policy(view: ServiceView, remark: Remark, with_chains: bool) -> Iterable[str]:
    start = f"  {view.policy.value:<7}  "
    for text in _ways_in(view):
        for line in textwrap.wrap(text, WIDTH - len(_INDENT), break_on_hyphens=False):
            yield start + line.replace(TIE, " ")
            start = _INDENT
    if view.verdict is not Verdict.DNAT:
        yield _INDENT + click.style(refusal(view), fg="yellow")
    longest = max((len(address_and_port(e.address, e.port)) for e in view.endpoints), default=0)
    if with_chains and view.chain:
        yield f"{_INDENT}chain {view.chain}"
    yield from (_endpoint(endpoint, longest, remark(view, endpoint)) for endpoint in view.endpoints)


def refusal(view: ServiceView) -> str:
    """Why a service port without endpoints is not served, and what becomes of its packets."""
    return (_SET_ASIDE if view.set_aside else REFUSALS)[view.verdict]


def _ways_in(view: ServiceView) -> Iterable[str]:
    """Which frontends lead to a policy's endpoints, and on what terms."""
    if view.frontends:
        yield ", ".join(frontend_in_words(frontend) for frontend in view.frontends)
    if view.from_this_node:
        frontends = ", ".join(frontend_in_words(frontend) for frontend in view.from_this_node)
        yield f"from this node and its pods: {frontends}"
    if view.source_ranges:
        yield f"load balancer open to {', '.join(view.source_ranges)}"
    if view.affinity_seconds is not None:
        yield f"a client keeps its endpoint for {in_units(view.affinity_seconds)}"
    if view.health_check_node_port:
        yield f"health check at node port {view.health_check_node_port}"


def frontend_in_words(frontend: Frontend) -> str:
    """Such as "node port 30080": what belongs together is not torn apart at the end of a line."""
    at = (
        str(frontend.port)
        if frontend.address == ANY_LOCAL
        else address_and_port(frontend.address, frontend.port)
    )
    return f"{_KINDS[frontend.kind]} {at}".replace(" ", TIE)


def _endpoint(endpoint: EndpointView, width: int, remark: str) -> str:
    share = f"{100 * endpoint.share:.3g}%"
    at = address_and_port(endpoint.address, endpoint.port)
    return f"{share:>{len(_INDENT) - 2}}  {at:<{width}}  {remark}".rstrip()


def in_units(seconds: int) -> str:
    """Seconds in the largest unit that needs no fraction: 3 h, 90 min."""
    return next(f"{seconds // size} {unit}" for size, unit in _UNITS if seconds % size == 0)
