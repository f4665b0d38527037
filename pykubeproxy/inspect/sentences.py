"""The explanation of a service port in sentences: why an endpoint is used or not, and how traffic gets there."""

from collections.abc import Iterable, Iterator, Sequence

from pykubeproxy.inspect.dump import Verdict
from pykubeproxy.inspect.explain import Explanation, PolicyWhy, PortWhy, frontends
from pykubeproxy.inspect.forms import frontend_in_words, in_units
from pykubeproxy.inspect.frontends import Frontend
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.inspect.rule import read
from pykubeproxy.objects import Endpoint, Family
from pykubeproxy.services.endpoints import Skipped, SkipReason
from pykubeproxy.services.ports import ServiceSkipReason
from pykubeproxy.services.selection import IgnoredHints, NodeTopology, Reason, Topology

# What a list of names is cut to in a sentence.
_SHOWN = 3
_POLICIES = {True: Policy.LOCAL, False: Policy.CLUSTER}


def place_in_words(place: NodeTopology) -> str:
    """Such as "node1 in zone-a"."""
    name = place.node_name or "a node without a name"
    return f"{name} in {place.zone}" if place.zone else f"{name}, whose zone is not known"


def why(reason: Reason, endpoint: Endpoint) -> str:
    """Why an endpoint is used or not, with what of the endpoint decided that."""
    match reason:
        case Reason.OTHER_NODE_HINTED:
            return f"{reason.value} (hinted for {_listed(endpoint.node_hints)})"
        case Reason.OTHER_ZONE_HINTED:
            return f"{reason.value} (hinted for {_listed(endpoint.zone_hints)})"
        case Reason.NOT_LOCAL:
            return f"{reason.value} (it is on {endpoint.node_name or 'no node that its slice names'})"
    return str(reason.value)


def why_passed_over(passed: Skipped) -> str:
    """Why an entry of an EndpointSlice is no endpoint of a port."""
    if passed.address:
        return f"{passed.address} in slice {passed.slice_name}: {passed.reason.value}"
    if passed.reason is SkipReason.NO_ADDRESS:
        return f"an endpoint in slice {passed.slice_name}: {passed.reason.value}"
    # The reasons are those of an endpoint; here the slice itself is spoken of.
    return f"slice {passed.slice_name}: {passed.reason.value.replace('its slice', 'it', 1)}"


def why_unheeded(unheeded: IgnoredHints) -> str:
    """Why hints are not gone by."""
    place = "node" if unheeded.hints is Topology.SAME_NODE else "zone"
    if unheeded.lacking:
        have = "has" if len(unheeded.lacking) == 1 else "have"
        cause = f"{_listed(unheeded.lacking)} {have} none, though ready"
    elif not unheeded.here:
        label = " (label topology.kubernetes.io/zone)" if place == "zone" else ""
        cause = f"this node's {place} is not known{label}"
    else:
        cause = f"no ready endpoint is hinted for {unheeded.here}"
    return f"Hints for {place}s are not heeded: {cause}."


def outcome(policy: PolicyWhy, slices: int) -> str:
    """What becomes of traffic under a policy that no endpoint serves; "" if one does."""
    if policy.verdict is Verdict.DNAT:
        return ""
    if policy.verdict is Verdict.DROP:
        return "dropped: the endpoints that could serve are on other nodes"
    if not slices:
        return "refused: no EndpointSlice bears the Service's name (label kubernetes.io/service-name)"
    if not policy.endpoints:
        return "refused: the Service's EndpointSlices have no endpoint for this port"
    return "refused: no endpoint is ready, nor serving while it terminates"


def ways(port: PortWhy) -> Iterator[str]:
    """What leads to a service port, and to which endpoints."""
    if port.set_aside:
        yield (
            f"It is set aside, for iptables refuses its rules: {port.set_aside}. Nobody is served"
            " until that has passed, and then as follows."
        )
    internal, *external = frontends(port.port)
    yield _leads(port, [internal], port.port.internal_local, "internalTrafficPolicy")
    if external:
        yield _leads(port, external, port.port.external_local, "externalTrafficPolicy")


def notes(port: PortWhy) -> Iterator[str]:
    """On which terms a service port is served, in a sentence for each thing that is worth knowing."""
    yield from (why_unheeded(it) for it in port.unheeded)
    if port.topology is Topology.SAME_NODE:
        yield "Hints for nodes are heeded: each ready endpoint has one, and some are for this node."
    if port.topology is Topology.SAME_ZONE:
        yield "Hints for zones are heeded: each ready endpoint has one, and some are for this zone."
    yield from _terms_of_use(port)
    if any(policy.verdict is Verdict.DNAT for policy in port.policies):
        yield _internal_masquerading(port)
        if port.port.externally_accessible:
            yield _external_masquerading(port)


def service_notes(explanation: Explanation) -> Iterator[str]:
    """What holds for a Service as a whole, one sentence each."""
    service = explanation.service
    served = {port.family for port in explanation.ports}
    reasons = explanation.left_out
    yield from (f"The field {refused}." for refused in service.refused)
    if not served and len(set(reasons.values())) == 1:
        yield f"It has no rules: {next(iter(reasons.values())).value}."
        return
    for family, reason in reasons.items():
        # That a Service has one family only is no news; that it has none is.
        if reason is not ServiceSkipReason.OTHER_FAMILY or not served:
            yield f"It has no {family.value} rules: {reason.value}."
    if service.external_ips and any(not port.terms.allow_external_ips for port in explanation.ports):
        yield (
            f"Its external IP{'s' * (len(service.external_ips) > 1)} {_and(service.external_ips)}"
            f" {'are' if len(service.external_ips) > 1 else 'is'} not served (feature gate"
            " AllowServiceExternalIPs=false)."
        )


def _leads(port: PortWhy, ways: Sequence[Frontend], local: bool, field: str) -> str:
    to = "endpoints of this node only" if local else "endpoints on any node"
    verb = "leads" if len(ways) == 1 else "lead"
    text = f"{_capital(_and(map(frontend_in_words, ways)))} {verb} to {to} ({field} {_POLICIES[local].value})"
    if local and field == "externalTrafficPolicy":
        text += f"; for {_whose(port)}, to endpoints on any node"
    return f"{text}."


def _whose(port: PortWhy) -> str:
    pods = " and its pods" if port.terms.options.local_traffic else ""
    return f"packets of this node{pods}"


def _internal_masquerading(port: PortWhy) -> str:
    options = port.terms.options
    at = f"At the cluster IP {'' if options.masquerade_all else 'the '}"
    if options.masquerade_all:
        return f"{at}every client's address is replaced by the node's (masqueradeAll)."
    local = options.local_traffic
    if local is None:
        return f"{at}client's address is kept: the configuration does not say what is a pod's traffic."
    if local.source in ("0.0.0.0/0", "::/0"):
        return f"{at}client's address is kept: every address counts as a pod's ({local.source})."
    pods = f"from {local.source}" if local.source else f"that comes in by {local.interface}"
    return f"{at}client's address is kept for traffic {pods}, and else replaced by the node's."


def _external_masquerading(port: PortWhy) -> str:
    if not port.port.external_local:
        return (
            "From outside, the client's address is replaced by the node's, for the endpoint may be on another node"
            " (externalTrafficPolicy Cluster)."
        )
    return (
        "From outside, the client's address is kept, as externalTrafficPolicy is Local; only this node's own is"
        " replaced."
    )


def _terms_of_use(port: PortWhy) -> Iterator[str]:
    it = port.port
    if it.load_balancer_ips and it.source_ranges:
        unfiltered = "; node ports are open to all" if it.node_port else ""
        yield f"The load balancer's IPs are open only to {_and(it.source_ranges)}{unfiltered}."
    if it.affinity_seconds is not None:
        kept = in_units(it.affinity_seconds)
        yield f"A client keeps its endpoint for {kept} after its last new connection (sessionAffinity ClientIP)."
    if it.health_check_node_port:
        yield (
            f"At health check node port {it.health_check_node_port} load balancers learn whether this node has"
            " ready endpoints."
        )
    if it.node_port:
        yield from _where_node_ports_answer(port)


def _where_node_ports_answer(port: PortWhy) -> Iterator[str]:
    """Nothing where they answer at all addresses."""
    jumps = [read(rule) for rule in port.terms.node_port_jumps]
    if all("--dst-type" in jump.options for jump in jumps) and jumps:
        if port.family is Family.IPV4 and not port.terms.options.localhost_node_ports:
            yield "The node port does not answer at 127.0.0.1 (localhostNodePorts)."
        return
    addresses = _and([jump.destination for jump in jumps] or ["none"])
    yield f"Of the Node's addresses, the node port answers at {addresses} (nodePortAddresses)."


def _listed(texts: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    if len(texts) <= _SHOWN:
        return _and(texts)
    return f"{', '.join(texts[:_SHOWN])} and {len(texts) - _SHOWN} more"


def _and(texts: Iterable[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
