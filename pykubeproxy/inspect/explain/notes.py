"""What `explain` says about a Service and its ports besides their endpoints."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from pykubeproxy.inspect.explain.model import Explanation, PortExplanation
from pykubeproxy.inspect.flows import Flow, FlowProblem, flow_problem
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.objects import Family, address_and_port
from pykubeproxy.rules.iptables_save import parse_rule
from pykubeproxy.services.ports import ANY_LOCAL, Frontend, ServiceSkipReason, frontends
from pykubeproxy.wording import listed, period, plural


def summary(
    explanation: PortExplanation, quarantined: str = "", *, settings_known: bool = True
) -> Iterator[str]:
    """Yield which frontends lead to which endpoints; `quarantined` is why they lead nowhere, or ""."""
    port = explanation.port
    if quarantined:
        yield f"Quarantined: {quarantined}. New clients are not served until iptables accepts the rules. Then:"
    internal, *external = frontends(port)
    yield f"{_destination([internal], port.internal_local, 'internalTrafficPolicy')}."
    if external:
        pods = " and its pods" if explanation.context.options.local_traffic or not settings_known else ""
        inside = f"; for packets of that node{pods}, to endpoints on any node" if port.external_local else ""
        yield f"{_destination(external, port.external_local, 'externalTrafficPolicy')}{inside}."


def notes(explanation: PortExplanation, *, settings_known: bool = True) -> Iterator[str]:
    """Yield who may connect and where, affinity and health checks; with known settings, masquerading."""
    port = explanation.port
    for ip, reason in port.skipped_ips:
        yield f"{address_and_port(ip, port.port)} is not served: {reason.value}."
    if port.load_balancer_ips and port.source_ranges is not None:
        unfiltered = "; node ports are open to all" if port.node_port else ""
        allowed = f"only to {listed(port.source_ranges)}" if port.source_ranges else "to nobody"
        yield f"The load balancer's IPs are open {allowed}{unfiltered}."
    if port.affinity_seconds is not None:
        kept = period(port.affinity_seconds)
        yield f"A client keeps its endpoint for {kept} after its last new connection (sessionAffinity ClientIP)."
    if port.unkept_lists:
        yield (
            f"Session affinity is not kept: it needs {port.unkept_lists} lists of clients, and the Services of a namespace"
            f" may have {explanation.context.max_affinity_lists}, the oldest Service first (maxAffinityLists)."
        )
    if port.health_check_node_port:
        yield (
            f"Health check node port {port.health_check_node_port} tells load balancers whether this node has ready"
            " endpoints."
        )
    if port.node_port:
        yield from _node_port_addresses(explanation)
    if settings_known and any(policy.chain for policy in explanation.policies):
        yield _internal_masquerading(explanation)
        if port.externally_accessible:
            yield (
                "Traffic from outside keeps the client's address (externalTrafficPolicy Local); only traffic of"
                " this node itself is masqueraded."
                if port.external_local
                else "For traffic from outside, the node's address replaces the client's, because the endpoint may"
                " be on another node (externalTrafficPolicy Cluster)."
            )


def stale_flow_notes(
    explanation: PortExplanation, served: Collection[str], flows: Iterable[Flow]
) -> Iterator[str]:
    """Yield on which endpoints that no longer serve connections of this node stay."""
    port = explanation.port
    to = {(frontend.address, frontend.port) for frontend in frontends(port)}
    stale: dict[str, list[Flow]] = {}
    for flow in flows:
        side = flow.original
        known = not to.isdisjoint(
            ((side.destination, side.destination_port), (ANY_LOCAL, side.destination_port))
        )
        if flow.protocol is port.protocol and known and flow_problem(flow, served) is FlowProblem.STALE:
            stale.setdefault(flow.translated_to, []).append(flow)
    for endpoint, some in sorted(stale.items()):
        stay = "connection stays" if len(some) == 1 else "connections stay"
        client = address_and_port(some[0].original.source, some[0].original.source_port)
        yield (
            f"On this node, {len(some)} {stay} on {endpoint}, which no longer serves, such as that from {client}: restart"
            " the client, or see `pykubeproxy trace --conntrack`."
        )


def service_notes(explanation: Explanation) -> Iterator[str]:
    """Yield what matters for a Service as a whole."""
    service = explanation.service
    served = {port.family for port in explanation.ports}
    reasons = explanation.skipped
    yield from (f"The field {refused}." for refused in service.rejected)
    if not served and len(set(reasons.values())) == 1:
        yield f"It has no rules: {next(iter(reasons.values())).value}."
        return
    for family, reason in reasons.items():
        # Single-stack Services are common; only a Service without any family is worth a note.
        if reason is not ServiceSkipReason.OTHER_FAMILY or not served:
            yield f"It has no {family.value} rules: {reason.value}."
    if service.external_ips and any(not port.context.allow_external_ips for port in explanation.ports):
        count = len(service.external_ips)
        yield (
            f"Its external {plural(count, 'IP')} {listed(service.external_ips)} {'is' if count == 1 else 'are'}"
            " not served (feature gate AllowServiceExternalIPs=false)."
        )


def _internal_masquerading(explanation: PortExplanation) -> str:
    options = explanation.context.options
    local = options.local_traffic
    if options.masquerade_all:
        return "At the cluster IP, the node's address replaces every client's address (masqueradeAll)."
    if local is None:
        return "At the cluster IP, traffic keeps the client's address: the configuration does not define pod traffic."
    if local.source in ("0.0.0.0/0", "::/0"):
        return f"At the cluster IP, traffic keeps the client's address: every address counts as a pod's ({local.source})."
    pods = f"from {local.source}" if local.source else f"that comes in on {local.interface}"
    return f"At the cluster IP, traffic {pods} keeps the client's address; other traffic is masqueraded."


def _node_port_addresses(explanation: PortExplanation) -> Iterator[str]:
    """Yield where the node port answers, unless it does at all addresses."""
    context = explanation.context
    jumps = [parse_rule(rule) for rule in context.node_port_jumps]
    if all("--dst-type" in jump.options for jump in jumps) and jumps:
        if explanation.family is Family.IPV4 and not context.options.localhost_node_ports:
            yield "The node port does not answer at 127.0.0.1 (localhostNodePorts)."
        return
    addresses = listed([jump.destination for jump in jumps] or ["none"])
    yield f"The node port answers at these addresses of the Node: {addresses} (nodePortAddresses)."


def _destination(some: Sequence[Frontend], local: bool, field: str) -> str:
    names = listed(map(str, some))
    verb = "leads" if len(some) == 1 else "lead"
    to = "only to endpoints on the node that receives the packet" if local else "to endpoints on any node"
    policy = Policy.LOCAL if local else Policy.CLUSTER
    return f"{names[:1].upper()}{names[1:]} {verb} {to} ({field} {policy.value})"
