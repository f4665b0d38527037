"""What a real API server refuses in the fields a proxy reads: wrong types, missing or invalid values.

It is lenient elsewhere: unknown fields are kept, and a cluster IP may lie outside the service CIDRs.
"""

import re
import socket
from collections.abc import Iterator
from typing import Any

import msgspec

from pykubeproxy.lab.apiserver.allocation import NODE_PORTS
from pykubeproxy.lab.apiserver.errors import bad_request, invalid
from pykubeproxy.lab.apiserver.resources import ENDPOINT_SLICES, NODES, SERVICES, JsonObject, Resource

WITH_NODE_PORTS = ("NodePort", "LoadBalancer")
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

_Problems = Iterator[tuple[str, str]]  # field and reason


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: list[str] = []
    resource_version: str = ""


class _Port(msgspec.Struct, rename="camel"):
    port: int = 0
    name: str = ""
    protocol: str = "TCP"
    target_port: int | str = 0
    node_port: int = 0


class _ServiceSpec(msgspec.Struct, rename="camel"):
    type: str = "ClusterIP"
    ports: list[_Port] = []
    selector: dict[str, str] = {}
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    cluster_ips: list[str] = msgspec.field(default_factory=list, name="clusterIPs")
    external_ips: list[str] = msgspec.field(default_factory=list, name="externalIPs")
    external_name: str = ""
    session_affinity: str = "None"
    ip_families: list[str] = []
    ip_family_policy: str = ""
    internal_traffic_policy: str = ""
    external_traffic_policy: str = ""
    health_check_node_port: int = 0
    load_balancer_source_ranges: list[str] = []


class _Service(msgspec.Struct):
    metadata: _Metadata
    spec: _ServiceSpec = msgspec.field(default_factory=_ServiceSpec)
    status: dict[str, Any] = {}


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    conditions: _Conditions | None = None
    hostname: str | None = None
    target_ref: dict[str, Any] | None = None
    node_name: str | None = None
    zone: str | None = None
    hints: dict[str, list[dict[str, str]]] | None = None


class _EndpointPort(msgspec.Struct):
    name: str | None = None
    protocol: str = "TCP"
    port: int | None = None


class _EndpointSlice(msgspec.Struct, rename="camel"):
    metadata: _Metadata
    address_type: str = ""
    endpoints: list[_Endpoint] | None = None
    ports: list[_EndpointPort] | None = None


class _NodeSpec(msgspec.Struct):
    pod_cidr: str = msgspec.field(default="", name="podCIDR")
    pod_cidrs: list[str] = msgspec.field(default_factory=list, name="podCIDRs")
    taints: list[dict[str, Any]] = []
    unschedulable: bool = False


class _NodeStatus(msgspec.Struct):
    addresses: list[dict[str, str]] = []


class _Node(msgspec.Struct):
    metadata: _Metadata
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


class _Other(msgspec.Struct):
    metadata: _Metadata


_Typed = _Service | _EndpointSlice | _Node | _Other
_TYPES: dict[Resource, type[_Typed]] = {SERVICES: _Service, ENDPOINT_SLICES: _EndpointSlice, NODES: _Node}


def check_types(resource: Resource, item: JsonObject) -> _Typed:
    """Return the fields we know. Raise a 400 if one has the wrong type."""
    try:
        return msgspec.convert(item, _TYPES.get(resource, _Other))
    except msgspec.ValidationError as error:
        where = f'{resource.kind} in version "v1" cannot be handled as a {resource.kind}'
        raise bad_request(f"{where}: {error}") from error


def check_values(resource: Resource, item: JsonObject) -> None:
    """Raise a 422 for the first invalid value of an object with its defaults."""
    typed = check_types(resource, item)
    for field, reason in _problems(resource, typed):
        raise invalid(resource, typed.metadata.name, field, reason)


def is_address(text: str, family: str = "") -> bool:
    """Return whether text is an IP address, of a family (IPv4 or IPv6) if one is given."""
    if not family:
        return is_address(text, "IPv4") or is_address(text, "IPv6")
    try:
        socket.inet_pton(socket.AF_INET if family == "IPv4" else socket.AF_INET6, text)
    except (OSError, ValueError):
        return False
    return True


def _problems(resource: Resource, typed: _Typed) -> _Problems:
    name = typed.metadata.name
    if not name:
        yield "metadata.name", "Required value: name is required"
    pattern, limit, kind = (
        (_SUBDOMAIN, 253, "subdomain") if resource is not SERVICES else (_LABEL, 63, "label")
    )
    if len(name) > limit or not pattern.fullmatch(name):
        reason = f'Invalid value: "{name}": must be a DNS {kind}: lower case letters, digits and "-"'
        yield "metadata.name", reason
    if isinstance(typed, _Service):
        yield from _service_problems(typed.spec)
        yield from _service_port_problems(typed.spec)
    elif isinstance(typed, _EndpointSlice):
        yield from _slice_problems(typed)


def _service_problems(spec: _ServiceSpec) -> _Problems:
    yield from _unsupported("spec.type", spec.type, ("ClusterIP", *WITH_NODE_PORTS, "ExternalName"))
    yield from _unsupported("spec.sessionAffinity", spec.session_affinity, ("ClientIP", "None"))
    policies = ("Cluster", "Local")
    if spec.internal_traffic_policy:
        yield from _unsupported("spec.internalTrafficPolicy", spec.internal_traffic_policy, policies)
    if spec.external_traffic_policy:
        yield from _unsupported("spec.externalTrafficPolicy", spec.external_traffic_policy, policies)
    if spec.type == "ExternalName" and not spec.external_name:
        yield "spec.externalName", "Required value"
    if not spec.ports and spec.type != "ExternalName" and spec.cluster_ip != "None":
        yield "spec.ports", "Required value"
    for address in (*spec.cluster_ips, *spec.external_ips):
        if not is_address(address) and (address != "None" or spec.cluster_ips != ["None"]):
            yield "spec.clusterIPs", f'Invalid value: "{address}": must be a valid IP address'


def _service_port_problems(spec: _ServiceSpec) -> _Problems:
    seen: set[str | tuple[str, int]] = set()
    for index, port in enumerate(spec.ports):
        field = f"spec.ports[{index}]"
        yield from _unsupported(f"{field}.protocol", port.protocol, _PROTOCOLS)
        if not 1 <= port.port <= 65535:
            yield f"{field}.port", f"Invalid value: {port.port}: must be 1-65535"
        if len(spec.ports) > 1 and not port.name:
            yield f"{field}.name", "Required value"
        number = (port.protocol, port.port)
        if seen & {port.name, number}:
            yield field, f'Duplicate value: "{port.name}" {port.protocol} {port.port}'
        seen |= {port.name, number}
        if port.node_port and spec.type not in WITH_NODE_PORTS:
            yield f"{field}.nodePort", f"Forbidden: a {spec.type} service has no node ports"
        if port.node_port and port.node_port not in NODE_PORTS:
            yield f"{field}.nodePort", f"Invalid value: {port.node_port}: must be 30000-32767"


def _slice_problems(endpoint_slice: _EndpointSlice) -> _Problems:
    family = endpoint_slice.address_type
    yield from _unsupported("addressType", family, ("FQDN", "IPv4", "IPv6"))
    endpoints = endpoint_slice.endpoints or []
    if len(endpoints) > 1000:
        yield "endpoints", f"Too many: {len(endpoints)}: must have at most 1000 items"
    for index, endpoint in enumerate(endpoints):
        field = f"endpoints[{index}].addresses"
        if not endpoint.addresses:
            yield field, "Required value: must contain at least 1 item"
        for address in endpoint.addresses:
            if family != "FQDN" and not is_address(address, family):
                yield field, f'Invalid value: "{address}": must be a valid {family} address'
    for index, port in enumerate(endpoint_slice.ports or []):
        yield from _unsupported(f"ports[{index}].protocol", port.protocol, _PROTOCOLS)
        if port.port is not None and not 1 <= port.port <= 65535:
            yield f"ports[{index}].port", f"Invalid value: {port.port}: must be 1-65535"


def _unsupported(field: str, value: str, choices: tuple[str, ...]) -> _Problems:
    if value not in choices:
        yield field, f'Unsupported value: "{value}": supported values: {", ".join(choices)}'
