"""Decode JSON of the API to validated values.

An invalid value costs only its entry of a list, or its own effect; `rejected` names it. An optional name that no object
can have counts as missing. An object with an invalid name or with a field of a wrong type is rejected as a whole.
"""

import re
import sys
from collections.abc import Iterable
from datetime import datetime
from functools import partial

import msgspec

from pykubeproxy.objects import check
from pykubeproxy.objects.check import accepted, accepted_or, shortened
from pykubeproxy.objects.values import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Family,
    Key,
    Kind,
    Node,
    Object,
    Port,
    RejectedValue,
    Service,
)

PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"
SERVICE_NAME_LABEL = "kubernetes.io/service-name"
ZONE_LABEL = "topology.kubernetes.io/zone"
_OS_LABEL = "kubernetes.io/os"
TRIGGER_TIME_ANNOTATION = "endpoints.kubernetes.io/last-change-trigger-time"

# An API server sets 36 characters; a manifest may have anything.
_LONGEST_UID = 64
# The default of kube-apiserver, in seconds.
_DEFAULT_AFFINITY = 10800
_MAX_AFFINITY = 86400
# The limit of ports times addresses and source ranges of one Service, each of which is at least one rule. Without it, an
# object of 100 kB could require ten million rules.
_MAX_RULES = 100_000


# The JSON of the Kubernetes API, with its names of fields. Fields that may be missing or null have a default; msgspec skips
# unknown fields.


class WireMetadata(msgspec.Struct, gc=False):
    name: str
    namespace: str | None = None
    uid: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creationTimestamp: str | None = None  # noqa: N815
    deletionTimestamp: str | None = None  # noqa: N815


class WirePort(msgspec.Struct, gc=False):
    port: int
    name: str | None = None
    protocol: str | None = None
    nodePort: int | None = None  # noqa: N815


class WireClientIP(msgspec.Struct, gc=False):
    timeoutSeconds: int | None = None  # noqa: N815


class WireSessionAffinityConfig(msgspec.Struct, gc=False):
    clientIP: WireClientIP | None = None  # noqa: N815


class WireServiceSpec(msgspec.Struct, gc=False):
    type: str | None = None
    clusterIP: str | None = None  # noqa: N815
    clusterIPs: list[str] | None = None  # noqa: N815
    ports: list[WirePort] | None = None
    externalIPs: list[str] | None = None  # noqa: N815
    loadBalancerSourceRanges: list[str] | None = None  # noqa: N815
    internalTrafficPolicy: str | None = None  # noqa: N815
    externalTrafficPolicy: str | None = None  # noqa: N815
    sessionAffinity: str | None = None  # noqa: N815
    sessionAffinityConfig: WireSessionAffinityConfig | None = None  # noqa: N815
    healthCheckNodePort: int | None = None  # noqa: N815


class WireIngress(msgspec.Struct, gc=False):
    ip: str | None = None
    ipMode: str | None = None  # noqa: N815


class WireLoadBalancerStatus(msgspec.Struct, gc=False):
    ingress: list[WireIngress] | None = None


class WireServiceStatus(msgspec.Struct, gc=False):
    loadBalancer: WireLoadBalancerStatus | None = None  # noqa: N815


class WireService(msgspec.Struct, gc=False):
    metadata: WireMetadata
    spec: WireServiceSpec
    status: WireServiceStatus | None = None


class WireConditions(msgspec.Struct, gc=False):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class WireNamed(msgspec.Struct, gc=False):
    name: str


class WireHints(msgspec.Struct, gc=False):
    forZones: list[WireNamed] | None = None  # noqa: N815
    forNodes: list[WireNamed] | None = None  # noqa: N815


class WireTargetRef(msgspec.Struct, gc=False):
    name: str | None = None


class WireEndpoint(msgspec.Struct, gc=False):
    addresses: list[str] | None = None
    conditions: WireConditions | None = None
    nodeName: str | None = None  # noqa: N815
    zone: str | None = None
    hints: WireHints | None = None
    targetRef: WireTargetRef | None = None  # noqa: N815


class WireEndpointPort(msgspec.Struct, gc=False):
    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class WireEndpointSlice(msgspec.Struct, gc=False):
    metadata: WireMetadata
    addressType: str  # noqa: N815
    endpoints: list[WireEndpoint] | None = None
    ports: list[WireEndpointPort] | None = None


class WireNodeAddress(msgspec.Struct, gc=False):
    type: str
    address: str


class WireTaint(msgspec.Struct, gc=False):
    key: str


class WireNodeSpec(msgspec.Struct, gc=False):
    podCIDR: str | None = None  # noqa: N815
    podCIDRs: list[str] | None = None  # noqa: N815
    taints: list[WireTaint] | None = None


class WireNodeInfo(msgspec.Struct, gc=False):
    kernelVersion: str | None = None  # noqa: N815


class WireNodeStatus(msgspec.Struct, gc=False):
    addresses: list[WireNodeAddress] | None = None
    nodeInfo: WireNodeInfo | None = None  # noqa: N815


class WireNode(msgspec.Struct, gc=False):
    metadata: WireMetadata
    spec: WireNodeSpec | None = None
    status: WireNodeStatus | None = None


_NO_CONDITIONS, _NO_HINTS = WireConditions(), WireHints()


class ObjectMeta(msgspec.Struct, gc=False):
    """The identity and version of an object, as far as readable."""

    name: str | None = None
    namespace: str | None = None
    resourceVersion: str | None = None  # noqa: N815

    def key(self, kind: Kind) -> Key:
        """Return the key of the object among those of its kind."""
        return Key("" if kind is Kind.NODE else self.namespace or "default", self.name or "?")


class _AnyObject(msgspec.Struct, gc=False):
    metadata: ObjectMeta


_objects = msgspec.json.Decoder(_AnyObject)
# Within so many bytes, an object has its name, its namespace and its version.
IDENTITY_BYTES = 4096
_IDENTITY = re.compile(rb'"(name|namespace|resourceVersion)": ?"([!#-\[\]-~]+)"')


def object_meta(raw: bytes | msgspec.Raw) -> ObjectMeta:
    """Return the identity and version of an object, or of the beginning of one; empty if this is something else."""
    try:
        return _objects.decode(raw).metadata
    except (ValueError, RecursionError):
        # The API server writes these fields before those with other text of users, such as labels.
        fields = _IDENTITY.findall(bytes(raw)[:IDENTITY_BYTES].partition(b'"metadata":')[2])
        return ObjectMeta(**{field.decode(): value.decode() for field, value in reversed(fields)})


class Undecodable(ValueError):
    """An object cannot be decoded; str() is one line."""

    def __init__(self, kind: Kind, meta: ObjectMeta, reason: str) -> None:
        title = str(Key(meta.namespace or "", meta.name or "?"))
        shown = title if title.isascii() and title.isprintable() and title else repr(title)
        line = f"{shortened(shown, 320)} is skipped: {shortened(' '.join(reason.split()), 300)}"
        super().__init__(f"{kind.value} {line}")


_services = msgspec.json.Decoder(WireService)
_slices = msgspec.json.Decoder(WireEndpointSlice)
_nodes = msgspec.json.Decoder(WireNode)


def decode(kind: Kind, raw: bytes | msgspec.Raw) -> Object:
    """Decode one object of the API; ignore unknown fields.

    Raises Undecodable if a required field is missing, a field has a wrong type, or a name or addressType is invalid.
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
        raise Undecodable(kind, object_meta(raw), _reason(error)) from None


def _reason(error: Exception) -> str:
    """Put the field first: msgspec writes "Expected `int`, got `str` - at `$.spec.ports[0].port`"."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    message, at, path = str(error).partition(" - at `$.")
    return f"{path.rstrip('`')}: {message[0].lower()}{message[1:]}" if at else message


def _service(service: WireService) -> Service:
    meta, spec = service.metadata, service.spec
    labels = meta.labels or {}
    namespace, name = _namespace(meta), check.label(meta.name, "metadata.name")
    type_ = check.optional_name(spec.type) or "ClusterIP"
    proxy_name = check.optional_name(labels[PROXY_NAME_LABEL]) if PROXY_NAME_LABEL in labels else None
    headless = spec.clusterIP == "None"
    if type_ == "ExternalName":  # only DNS serves it
        return Service(namespace, name, type_, proxy_name=proxy_name, headless=headless)
    balancer = service.status.loadBalancer if service.status else None
    ingress = (balancer.ingress if balancer else None) or []
    _check_size(spec, ingress)
    rejected: list[RejectedValue] = []
    return Service(
        namespace=namespace,
        name=name,
        type=type_,
        cluster_ips=() if headless else _cluster_ips(spec, rejected),
        ports=accepted("spec.ports", enumerate(spec.ports or ()), _service_port, rejected, "the port"),
        external_ips=accepted(
            "spec.externalIPs",
            enumerate(spec.externalIPs or ()),
            partial(check.servable, field="", reject_link_local=True),
            rejected,
        ),
        load_balancer_ips=_load_balancer_ips(ingress, rejected),
        source_ranges=accepted(
            "spec.loadBalancerSourceRanges",
            # As in kube-proxy, white space around a range does not matter.
            enumerate(map(str.strip, spec.loadBalancerSourceRanges or ())),
            partial(check.cidr, field=""),
            rejected,
        ),
        internal_local=spec.internalTrafficPolicy == "Local",
        external_local=spec.externalTrafficPolicy == "Local",
        affinity_seconds=_affinity_seconds(spec, rejected),
        health_check_node_port=accepted_or(
            0, "spec.healthCheckNodePort", spec.healthCheckNodePort, check.port, rejected
        ),
        proxy_name=proxy_name,
        headless=headless,
        rejected=tuple(rejected),
        uid=meta.uid if meta.uid and len(meta.uid) <= _LONGEST_UID else "",
        created=timestamp(meta.creationTimestamp) or 0.0,
    )


def _namespace(meta: WireMetadata) -> str:
    return sys.intern(check.label(meta.namespace or "default", "metadata.namespace"))


def _check_size(spec: WireServiceSpec, ingress: list[WireIngress]) -> None:
    ports, ranges = len(spec.ports or ()), len(spec.loadBalancerSourceRanges or ())
    addresses = len(spec.externalIPs or ()) + len(ingress)
    if max(1, ports) * (1 + addresses + ranges) > _MAX_RULES:
        raise ValueError(
            f"{ports} ports for {addresses} addresses and {ranges} source ranges are more than {_MAX_RULES} rules"
        )


def _cluster_ips(spec: WireServiceSpec, rejected: list[RejectedValue]) -> tuple[str, ...]:
    if not spec.clusterIP:
        return ()
    addresses = spec.clusterIPs or [spec.clusterIP]
    return accepted("spec.clusterIPs", enumerate(addresses), partial(check.servable, field=""), rejected)


def _affinity_seconds(spec: WireServiceSpec, rejected: list[RejectedValue]) -> int | None:
    if spec.sessionAffinity != "ClientIP":
        return None
    config = spec.sessionAffinityConfig
    seconds = config.clientIP.timeoutSeconds if config and config.clientIP else None
    if seconds is None:
        return _DEFAULT_AFFINITY
    field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
    return accepted_or(_DEFAULT_AFFINITY, field, seconds, _timeout, rejected)


def _timeout(seconds: int, field: str) -> int:
    if not 0 < seconds <= _MAX_AFFINITY:
        raise check.Invalid(field, seconds, f"not 1 to {_MAX_AFFINITY}")
    return seconds


def _service_port(port: WirePort) -> Port:
    number = check.port(port.port, ".port")
    if not number:
        raise check.Invalid(".port", 0, "not a port from 1 to 65535")
    return Port(
        name=sys.intern(check.label(port.name, ".name")) if port.name else "",
        protocol=check.protocol(port.protocol, ".protocol"),
        port=number,
        node_port=check.port(port.nodePort, ".nodePort"),
    )


def _load_balancer_ips(ingress: list[WireIngress], rejected: list[RejectedValue]) -> tuple[str, ...]:
    """Return the ingress addresses that need rules, which excludes ipMode Proxy (KEP-1860)."""
    addresses = (
        (number, entry.ip)
        for number, entry in enumerate(ingress)
        if entry.ip and entry.ipMode in (None, "VIP")
    )
    return accepted("status.loadBalancer.ingress", addresses, partial(check.servable, field=".ip"), rejected)


def _slice(slice_: WireEndpointSlice) -> EndpointSlice:
    meta = slice_.metadata
    labels, annotations = meta.labels or {}, meta.annotations or {}
    service = labels.get(SERVICE_NAME_LABEL, "")
    if slice_.addressType not in ("IPv4", "IPv6", "FQDN"):
        raise ValueError(f"addressType is {slice_.addressType!r}, not IPv4, IPv6 or FQDN")
    family = None if slice_.addressType == "FQDN" else Family(slice_.addressType)
    rejected: list[RejectedValue] = []
    return EndpointSlice(
        namespace=_namespace(meta),
        name=check.subdomain(meta.name, "metadata.name"),
        service=check.label(service, f"label {SERVICE_NAME_LABEL}") if service else "",
        family=family,
        endpoints=_endpoints(family, slice_.endpoints, rejected) if family else (),
        ports=accepted("ports", enumerate(slice_.ports or ()), _endpoint_port, rejected, "the port"),
        headless=HEADLESS_LABEL in labels,
        trigger_time=timestamp(annotations.get(TRIGGER_TIME_ANNOTATION)),
        rejected=tuple(rejected),
    )


def _endpoints(
    family: Family, endpoints: list[WireEndpoint] | None, rejected: list[RejectedValue]
) -> tuple[Endpoint, ...]:
    return accepted(
        "endpoints", enumerate(endpoints or ()), partial(_endpoint, family), rejected, "the endpoint"
    )


def _endpoint(family: Family, endpoint: WireEndpoint) -> Endpoint:
    conditions, hints = endpoint.conditions or _NO_CONDITIONS, endpoint.hints or _NO_HINTS
    first = endpoint.addresses[0] if endpoint.addresses else ""
    if first:
        first = check.servable(first, ".addresses[0]", family=family, reject_link_local=True)
    return Endpoint(
        address=first,
        ready=conditions.ready is not False,
        serving=conditions.serving is not False,
        terminating=conditions.terminating is True,
        node_name=sys.intern(check.optional_name(endpoint.nodeName)),
        zone=sys.intern(check.optional_name(endpoint.zone, check.LONGEST_VALUE)),
        zone_hints=_names(hints.forZones) if hints.forZones else (),
        node_hints=_names(hints.forNodes) if hints.forNodes else (),
        pod=check.optional_name(endpoint.targetRef.name) if endpoint.targetRef else "",
    )


def _names(hints: Iterable[WireNamed]) -> tuple[str, ...]:
    # An ignored hint must match nothing, but be there: without hints, an endpoint serves all zones.
    return tuple([sys.intern(check.optional_name(hint.name) or "?") for hint in hints])


def _endpoint_port(port: WireEndpointPort) -> EndpointPort:
    return EndpointPort(
        name=sys.intern(check.label(port.name, ".name")) if port.name else port.name,
        protocol=check.protocol(port.protocol, ".protocol"),
        port=check.port(port.port, ".port") or None,
    )


def timestamp(text: str | None) -> float | None:
    """Return an RFC 3339 time in seconds since 1970; None if missing or malformed."""
    try:
        time = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    # Python would read a time without offset as local time.
    return time.timestamp() if time and time.tzinfo else None


def _node(node: WireNode) -> Node:
    meta, spec, status = node.metadata, node.spec or WireNodeSpec(), node.status or WireNodeStatus()
    labels, info = meta.labels or {}, status.nodeInfo or WireNodeInfo()
    pod_cidrs = spec.podCIDRs or ([spec.podCIDR] if spec.podCIDR else [])
    addresses = (
        (number, entry.address)
        for type_ in ("InternalIP", "ExternalIP")
        for number, entry in enumerate(status.addresses or ())
        if entry.type == type_
    )
    rejected: list[RejectedValue] = []
    return Node(
        name=check.subdomain(meta.name, "metadata.name"),
        addresses=accepted("status.addresses", addresses, partial(check.address, field=".address"), rejected),
        pod_cidrs=accepted("spec.podCIDRs", enumerate(pod_cidrs), partial(check.cidr, field=""), rejected),
        zone=check.optional_name(labels.get(ZONE_LABEL), check.LONGEST_VALUE),
        deleting=meta.deletionTimestamp is not None,
        taints=tuple(check.optional_name(taint.key) for taint in spec.taints or ()),
        rejected=tuple(rejected),
        os=check.optional_name(labels.get(_OS_LABEL)),
        # Some kernels that are built from changed sources end with "+".
        kernel=check.optional_name((info.kernelVersion or "").rstrip("+")),
    )
