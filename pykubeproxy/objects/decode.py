"""JSON of the API to checked values. An object that does not fit is refused whole, with one line that says why."""

import datetime
import sys
from collections.abc import Iterable

import msgspec

from pykubeproxy.objects import check, wire
from pykubeproxy.objects.values import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Family,
    Kind,
    Node,
    Object,
    Port,
    Refused,
    Service,
)

PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"
SERVICE_NAME_LABEL = "kubernetes.io/service-name"
ZONE_LABEL = "topology.kubernetes.io/zone"
TRIGGER_TIME_ANNOTATION = "endpoints.kubernetes.io/last-change-trigger-time"

# What kube-apiserver fills in for ClientIP affinity without a timeout, in seconds.
_DEFAULT_AFFINITY = 10800
_MAX_AFFINITY = 86400
# Times that one Service may say its ports for each of its addresses and source ranges: each is a rule or more. A text of
# a hundred kilobytes could ask for ten million otherwise. It is some hundred times what any Service has.
_MOST_PLACES = 100_000


class Undecodable(ValueError):
    """An object that cannot be used. `namespace` and `name` are what could be read of them; str() is one line."""

    def __init__(self, kind: Kind, namespace: str, name: str, reason: str) -> None:
        self.kind, self.namespace, self.name, self.reason = kind, namespace, name, reason
        title = f"{namespace}/{name}" if namespace else name
        shown = title if title.isascii() and title.isprintable() and title else repr(title)
        line = f"{_shortened(shown, 320)} is passed over: {_shortened(' '.join(reason.split()), 300)}"
        super().__init__(f"{kind.value} {line}")


def _shortened(text: str, longest: int) -> str:
    """A text without its middle if it is too long to be read; what is wrong with a value stands at the end."""
    return text if len(text) <= longest else f"{text[: longest - 80]} ... {text[-75:]}"


_services = msgspec.json.Decoder(wire.Service)
_slices = msgspec.json.Decoder(wire.EndpointSlice)
_nodes = msgspec.json.Decoder(wire.Node)


def decode(kind: Kind, raw: bytes | msgspec.Raw) -> Object:
    """Decode one object of the API.

    Raises Undecodable for a field that is missing, of a wrong type or not a legal value. Fields this program does not
    know are skipped.
    """
    try:
        match kind:
            case Kind.SERVICE:
                return _service(_services.decode(raw))
            case Kind.ENDPOINT_SLICE:
                return _slice(_slices.decode(raw))
            case Kind.NODE:
                return _node(_nodes.decode(raw))
    except (ValueError, RecursionError) as error:
        namespace, name = _title(raw)
        raise Undecodable(kind, namespace, name, _reason(error)) from None


def _reason(error: Exception) -> str:
    """msgspec writes "Expected `int`, got `str` - at `$.spec.ports[0].port`"; the field reads better in front."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    said, at, path = str(error).partition(" - at `$.")
    return f"{path.rstrip('`')}: {said[0].lower()}{said[1:]}" if at else said


class _Titled(msgspec.Struct):
    metadata: dict[str, msgspec.Raw]


def _title(raw: bytes | msgspec.Raw) -> tuple[str, str]:
    """Namespace and name of an object that is otherwise not to be decoded, "?" for a name that is not there."""

    def text(field: str, missing: str) -> str:
        try:
            return msgspec.json.decode(metadata[field], type=str)
        except (KeyError, ValueError):
            return missing

    try:
        metadata = msgspec.json.decode(raw, type=_Titled).metadata
    except (ValueError, RecursionError):
        return "", "?"
    return text("namespace", ""), text("name", "?")


def _service(it: wire.Service) -> Service:
    meta, spec = it.metadata, it.spec
    labels = meta.labels or {}
    headless = spec.clusterIP == "None"
    affinity = None
    if spec.sessionAffinity == "ClientIP":
        affinity = _affinity_seconds(spec.sessionAffinityConfig)
    _check_extent(it)
    refused: list[Refused] = []
    return Service(
        namespace=check.label(meta.namespace or "default", "metadata.namespace"),
        name=check.label(meta.name, "metadata.name"),
        type=spec.type or "ClusterIP",
        cluster_ips=() if headless else _cluster_ips(spec, refused),
        ports=tuple(_service_port(port, i) for i, port in enumerate(spec.ports or ())),
        external_ips=_served(
            ((f"spec.externalIPs[{i}]", ip) for i, ip in enumerate(spec.externalIPs or ())),
            refused,
            link_local_too=True,
        ),
        load_balancer_ips=_load_balancer_ips(it.status, refused),
        source_ranges=tuple(
            check.cidr(text, f"spec.loadBalancerSourceRanges[{i}]")
            for i, text in enumerate(spec.loadBalancerSourceRanges or ())
        ),
        internal_local=spec.internalTrafficPolicy == "Local",
        external_local=spec.externalTrafficPolicy == "Local",
        affinity_seconds=affinity,
        health_check_node_port=check.port(spec.healthCheckNodePort, "spec.healthCheckNodePort"),
        proxy_name=labels.get(PROXY_NAME_LABEL),
        headless=headless,
        refused=tuple(refused),
    )


def _check_extent(it: wire.Service) -> None:
    spec, balancer = it.spec, it.status.loadBalancer if it.status else None
    ports, ranges = len(spec.ports or ()), len(spec.loadBalancerSourceRanges or ())
    addresses = len(spec.externalIPs or ()) + len(balancer.ingress or () if balancer else ())
    if ports * (1 + addresses + ranges) > _MOST_PLACES:
        raise ValueError(
            f"{ports} ports for {addresses} addresses and {ranges} source ranges are more than {_MOST_PLACES} rules"
        )


def _served(
    addresses: Iterable[tuple[str, str]], refused: list[Refused], link_local_too: bool = False
) -> tuple[str, ...]:
    """The addresses of these fields that may be served; the others are added to `refused`.

    A rule for 127.0.0.1 or 0.0.0.0 would take the node's own connections away from it.
    """
    found = []
    for field, text in addresses:
        address = check.address(text, field)
        if reason := check.special(address, link_local_too):
            refused.append(Refused(field, address, reason))
        else:
            found.append(address)
    return tuple(found)


def _cluster_ips(spec: wire.ServiceSpec, refused: list[Refused]) -> tuple[str, ...]:
    if not spec.clusterIP:
        return ()
    addresses = spec.clusterIPs or [spec.clusterIP]
    return _served(((f"spec.clusterIPs[{i}]", ip) for i, ip in enumerate(addresses)), refused)


def _affinity_seconds(config: wire.SessionAffinityConfig | None) -> int:
    seconds = config.clientIP.timeoutSeconds if config and config.clientIP else None
    if seconds is None:
        return _DEFAULT_AFFINITY
    if not 0 < seconds <= _MAX_AFFINITY:
        raise ValueError(
            f"spec.sessionAffinityConfig.clientIP.timeoutSeconds is {seconds}, not 1 to {_MAX_AFFINITY}"
        )
    return seconds


def _service_port(it: wire.Port, index: int) -> Port:
    at = f"spec.ports[{index}]"
    number = check.port(it.port, f"{at}.port")
    if not number:
        raise ValueError(f"{at}.port is 0, not a port from 1 to 65535")
    return Port(
        name=check.label(it.name, f"{at}.name") if it.name else "",
        protocol=check.protocol(it.protocol, f"{at}.protocol"),
        port=number,
        node_port=check.port(it.nodePort, f"{at}.nodePort"),
    )


def _load_balancer_ips(status: wire.ServiceStatus | None, refused: list[Refused]) -> tuple[str, ...]:
    """Addresses of the ingresses that want rules: with ipMode Proxy the balancer keeps its packets (KEP-1860)."""
    balancer = status.loadBalancer if status else None
    addresses = (
        (f"status.loadBalancer.ingress[{i}].ip", ingress.ip)
        for i, ingress in enumerate(balancer.ingress or () if balancer else ())
        if ingress.ip and ingress.ipMode in (None, "VIP")
    )
    return _served(addresses, refused)


def _slice(it: wire.EndpointSlice) -> EndpointSlice:
    meta = it.metadata
    labels, annotations = meta.labels or {}, meta.annotations or {}
    service = labels.get(SERVICE_NAME_LABEL, "")
    if it.addressType not in ("IPv4", "IPv6", "FQDN"):
        raise ValueError(f"addressType is {it.addressType!r}, not IPv4, IPv6 or FQDN")
    family = None if it.addressType == "FQDN" else Family(it.addressType)
    endpoints = (
        tuple(_endpoint(family, endpoint, i) for i, endpoint in enumerate(it.endpoints or ()))
        if family
        else ()
    )
    return EndpointSlice(
        namespace=check.label(meta.namespace or "default", "metadata.namespace"),
        name=check.subdomain(meta.name, "metadata.name"),
        service=check.label(service, f"label {SERVICE_NAME_LABEL}") if service else "",
        family=family,
        endpoints=endpoints,
        ports=tuple(_endpoint_port(port, i) for i, port in enumerate(it.ports or ())),
        headless=HEADLESS_LABEL in labels,
        trigger_time=_timestamp(annotations.get(TRIGGER_TIME_ANNOTATION)),
        refused=tuple(
            Refused(f"endpoints[{i}].addresses[0]", endpoint.address, reason)
            for i, endpoint in enumerate(endpoints)
            if (reason := check.special(endpoint.address, link_local_too=True))
        ),
    )


def _endpoint(family: Family, it: wire.Endpoint, index: int) -> Endpoint:
    conditions = it.conditions or wire.Conditions()
    hints = it.hints or wire.Hints()
    first = it.addresses[0] if it.addresses else ""
    return Endpoint(
        address=check.address_of(family, first, f"endpoints[{index}].addresses[0]") if first else "",
        ready=conditions.ready is not False,
        serving=conditions.serving is not False,
        terminating=conditions.terminating is True,
        node_name=sys.intern(it.nodeName or ""),
        zone=sys.intern(it.zone or ""),
        zone_hints=tuple(sys.intern(zone.name) for zone in hints.forZones or ()),
        node_hints=tuple(sys.intern(node.name) for node in hints.forNodes or ()),
        pod=(it.targetRef.name or "") if it.targetRef else "",
    )


def _endpoint_port(it: wire.EndpointPort, index: int) -> EndpointPort:
    at = f"ports[{index}]"
    return EndpointPort(
        name=check.label(it.name, f"{at}.name") if it.name else it.name,
        protocol=check.protocol(it.protocol, f"{at}.protocol"),
        port=check.port(it.port, f"{at}.port") or None,
    )


def _timestamp(text: str | None) -> float | None:
    """Seconds since 1970 of an RFC 3339 time; None if there is none or it is malformed, for it only feeds a metric."""
    try:
        time = datetime.datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    # Without an offset it would be taken for the time of wherever this process runs.
    return time.timestamp() if time and time.tzinfo else None


def _node(it: wire.Node) -> Node:
    meta, spec, status = it.metadata, it.spec or wire.NodeSpec(), it.status or wire.NodeStatus()
    pod_cidrs = spec.podCIDRs or ([spec.podCIDR] if spec.podCIDR else [])
    return Node(
        name=check.subdomain(meta.name, "metadata.name"),
        addresses=tuple(
            check.address(it.address, f"status.addresses[{i}].address")
            for wanted in ("InternalIP", "ExternalIP")
            for i, it in enumerate(status.addresses or ())
            if it.type == wanted
        ),
        pod_cidrs=tuple(check.cidr(text, f"spec.podCIDRs[{i}]") for i, text in enumerate(pod_cidrs)),
        zone=(meta.labels or {}).get(ZONE_LABEL, ""),
        deleting=meta.deletionTimestamp is not None,
        taints=tuple(taint.key for taint in spec.taints or ()),
    )
