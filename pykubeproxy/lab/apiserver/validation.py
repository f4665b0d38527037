"""What a real API server would refuse: wrong types, missing or impossible values, in the fields a proxy reads.

It is lenient elsewhere: unknown fields are kept, and a cluster IP may lie outside the service CIDRs.
"""

import re
import socket
from typing import Any

import msgspec

from pykubeproxy.lab.apiserver.allocation import NODE_PORTS
from pykubeproxy.lab.apiserver.errors import ApiError, bad_request, invalid
from pykubeproxy.lab.apiserver.resources import ENDPOINT_SLICES, NODES, SERVICES, JsonObject, Resource

PROTOCOLS = ("TCP", "UDP", "SCTP")
TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


class Metadata(msgspec.Struct, rename="camel"):
    """The metadata that clients write."""

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
    metadata: Metadata
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
    deprecated_topology: dict[str, str] | None = None
    node_name: str | None = None
    zone: str | None = None
    hints: dict[str, list[dict[str, str]]] | None = None


class _EndpointPort(msgspec.Struct):
    name: str | None = None
    protocol: str = "TCP"
    port: int | None = None


class _EndpointSlice(msgspec.Struct, rename="camel"):
    metadata: Metadata
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
    metadata: Metadata
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


class _Other(msgspec.Struct):
    metadata: Metadata


_Known = _Service | _EndpointSlice | _Node | _Other
_SHAPES: dict[Resource, type[_Known]] = {SERVICES: _Service, ENDPOINT_SLICES: _EndpointSlice, NODES: _Node}


def check_types(resource: Resource, item: JsonObject) -> None:
    """Raises a 400 if a field that we know has the wrong type."""
    _shaped(resource, item)


def check_values(resource: Resource, item: JsonObject) -> None:
    """Raises a 422 for the first value that cannot be, after defaulting."""
    known = _shaped(resource, item)
    _check_name(resource, known.metadata.name)
    if isinstance(known, _Service):
        _check_service(known)
    elif isinstance(known, _EndpointSlice):
        _check_slice(known)


def is_address(text: str, family: str = "") -> bool:
    """Whether text is an IP address, of a family (IPv4 or IPv6) if one is given."""
    number = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}.get(family)
    if number is None:
        return is_address(text, "IPv4") or is_address(text, "IPv6")
    try:
        socket.inet_pton(number, text)
    except (OSError, ValueError):
        return False
    return True


def _shaped(resource: Resource, item: JsonObject) -> _Known:
    shape = _SHAPES.get(resource, _Other)
    try:
        return msgspec.convert(item, shape)
    except msgspec.ValidationError as error:
        where = f'{resource.kind} in version "v1" cannot be handled as a {resource.kind}'
        raise bad_request(f"{where}: {error}") from error


def _check_name(resource: Resource, name: str) -> None:
    if not name:
        raise invalid(
            resource.kind, resource.group, name, "metadata.name", "Required value: name is required"
        )
    pattern, limit = (_LABEL, 63) if resource is SERVICES else (_SUBDOMAIN, 253)
    if len(name) > limit or not pattern.fullmatch(name):
        what = "a DNS label" if resource is SERVICES else "a DNS subdomain"
        why = f'Invalid value: "{name}": must be {what}: lower case letters, digits and "-"'
        raise invalid(resource.kind, resource.group, name, "metadata.name", why)


def _check_service(service: _Service) -> None:
    spec, name = service.spec, service.metadata.name
    if spec.type not in TYPES:
        raise _refused(name, "spec.type", spec.type, TYPES)
    if spec.session_affinity not in ("None", "ClientIP"):
        raise _refused(name, "spec.sessionAffinity", spec.session_affinity, ("ClientIP", "None"))
    for field, policy in (
        ("internal", spec.internal_traffic_policy),
        ("external", spec.external_traffic_policy),
    ):
        if policy not in ("", "Cluster", "Local"):
            raise _refused(name, f"spec.{field}TrafficPolicy", policy, ("Cluster", "Local"))
    if spec.type == "ExternalName" and not spec.external_name:
        raise invalid("Service", "", name, "spec.externalName", "Required value")
    if not spec.ports and spec.type != "ExternalName" and spec.cluster_ip != "None":
        raise invalid("Service", "", name, "spec.ports", "Required value")
    for address in (*spec.cluster_ips, *spec.external_ips):
        if not is_address(address) and (address != "None" or spec.cluster_ips != ["None"]):
            why = f'Invalid value: "{address}": must be a valid IP address'
            raise invalid("Service", "", name, "spec.clusterIPs", why)
    _check_ports(name, spec)


def _check_ports(name: str, spec: _ServiceSpec) -> None:
    seen_names: set[str] = set()
    seen_numbers: set[tuple[str, int]] = set()
    for index, port in enumerate(spec.ports):
        field = f"spec.ports[{index}]"
        if port.protocol not in PROTOCOLS:
            raise _refused(name, f"{field}.protocol", port.protocol, PROTOCOLS)
        if not 1 <= port.port <= 65535:
            raise invalid(
                "Service", "", name, f"{field}.port", f"Invalid value: {port.port}: must be 1-65535"
            )
        if len(spec.ports) > 1 and not port.name:
            raise invalid("Service", "", name, f"{field}.name", "Required value")
        if port.name in seen_names or (port.protocol, port.port) in seen_numbers:
            raise invalid(
                "Service", "", name, field, f'Duplicate value: "{port.name}" {port.protocol} {port.port}'
            )
        if port.node_port and (
            spec.type not in ("NodePort", "LoadBalancer") or port.node_port not in NODE_PORTS
        ):
            why = f"Invalid value: {port.node_port}: a node port of a {spec.type} service must be "
            why += "30000-32767" if spec.type in ("NodePort", "LoadBalancer") else "absent"
            raise invalid("Service", "", name, f"{field}.nodePort", why)
        seen_names.add(port.name)
        seen_numbers.add((port.protocol, port.port))


def _check_slice(endpoint_slice: _EndpointSlice) -> None:
    name, family = endpoint_slice.metadata.name, endpoint_slice.address_type
    if family not in ("IPv4", "IPv6", "FQDN"):
        raise _refused(name, "addressType", family, ("FQDN", "IPv4", "IPv6"), ENDPOINT_SLICES)
    endpoints = endpoint_slice.endpoints or []
    if len(endpoints) > 1000:
        why = f"Too many: {len(endpoints)}: must have at most 1000 items"
        raise invalid("EndpointSlice", ENDPOINT_SLICES.group, name, "endpoints", why)
    for index, endpoint in enumerate(endpoints):
        field = f"endpoints[{index}].addresses"
        if not endpoint.addresses:
            why = "Required value: must contain at least 1 item"
            raise invalid("EndpointSlice", ENDPOINT_SLICES.group, name, field, why)
        for address in endpoint.addresses:
            if family != "FQDN" and not is_address(address, family):
                why = f'Invalid value: "{address}": must be a valid {family} address'
                raise invalid("EndpointSlice", ENDPOINT_SLICES.group, name, field, why)
    for index, port in enumerate(endpoint_slice.ports or []):
        if port.protocol not in PROTOCOLS:
            raise _refused(name, f"ports[{index}].protocol", port.protocol, PROTOCOLS, ENDPOINT_SLICES)
        if port.port is not None and not 1 <= port.port <= 65535:
            why = f"Invalid value: {port.port}: must be 1-65535"
            raise invalid("EndpointSlice", ENDPOINT_SLICES.group, name, f"ports[{index}].port", why)


def _refused(
    name: str, field: str, value: str, choices: tuple[str, ...], resource: Resource = SERVICES
) -> ApiError:
    why = f'Unsupported value: "{value}": supported values: {", ".join(choices)}'
    return invalid(resource.kind, resource.group, name, field, why)
