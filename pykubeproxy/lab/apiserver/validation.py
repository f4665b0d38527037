"""What a real API server refuses in the fields a proxy reads: wrong types, missing or invalid values.

It is lenient elsewhere: unknown fields are kept, and a cluster IP may lie outside the service CIDRs.
"""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from pykubeproxy.lab.apiserver.allocation import NODE_PORTS
from pykubeproxy.lab.apiserver.errors import ApiError, invalid
from pykubeproxy.lab.apiserver.resources import ENDPOINT_SLICES, NODES, PODS, SERVICES, JsonObject, Resource
from pykubeproxy.objects import Family, check, wire

WITH_NODE_PORTS = ("NodePort", "LoadBalancer")
_POLICIES = ("Cluster", "Local")
_CHOICES = {
    "type": ("ClusterIP", *WITH_NODE_PORTS, "ExternalName"),
    "sessionAffinity": ("ClientIP", "None"),
    "internalTrafficPolicy": _POLICIES,
    "externalTrafficPolicy": _POLICIES,
}

_Problems = Iterator[tuple[str, str]]  # field and reason


class _ServiceSpec(wire.ServiceSpec):
    selector: dict[str, str] | None = None
    externalName: str | None = None  # noqa: N815
    ipFamilies: list[str] | None = None  # noqa: N815
    ipFamilyPolicy: str | None = None  # noqa: N815


class _Service(wire.Service, kw_only=True):
    spec: _ServiceSpec


class _Container(msgspec.Struct):
    name: str = ""
    image: str = ""
    command: list[str] | None = None
    args: list[str] | None = None


class _PodSpec(msgspec.Struct):
    containers: list[_Container] | None = None
    initContainers: list[_Container] | None = None  # noqa: N815
    nodeName: str | None = None  # noqa: N815
    hostNetwork: bool | None = None  # noqa: N815
    terminationGracePeriodSeconds: int | None = None  # noqa: N815


class _Pod(msgspec.Struct):
    metadata: wire.Metadata
    spec: _PodSpec


class _Other(msgspec.Struct):
    metadata: wire.Metadata


_Typed = _Service | wire.EndpointSlice | wire.Node | _Pod | _Other
_TYPES: dict[Resource, type[_Typed]] = {
    SERVICES: _Service,
    ENDPOINT_SLICES: wire.EndpointSlice,
    NODES: wire.Node,
    PODS: _Pod,
}


def check_types(resource: Resource, item: JsonObject) -> _Typed:
    """Return the fields we know. Raise a 400 if one has the wrong type."""
    try:
        return msgspec.convert(item, _TYPES.get(resource, _Other))
    except msgspec.ValidationError as error:
        where = f'{resource.kind} in version "v1" cannot be handled as a {resource.kind}'
        raise ApiError(400, f"{where}: {error}") from error


def check_values(resource: Resource, item: JsonObject) -> None:
    """Raise a 422 for the first invalid value of an object with its defaults."""
    typed = check_types(resource, item)
    for field, reason in _problems(resource, typed):
        raise invalid(resource, typed.metadata.name, field, reason)


def _problems(resource: Resource, typed: _Typed) -> _Problems:
    if not typed.metadata.name:
        yield "metadata.name", "Required value: name is required"
    rule = check.label if resource is SERVICES else check.subdomain
    yield from _malformed("metadata.name", typed.metadata.name, rule)
    if isinstance(typed, _Service):
        yield from _service_problems(typed.spec)
    elif isinstance(typed, wire.EndpointSlice):
        yield from _slice_problems(typed)
    elif isinstance(typed, _Pod):
        yield from _pod_problems(typed.spec)


def _service_problems(spec: _ServiceSpec) -> _Problems:
    for field, choices in _CHOICES.items():
        yield from _unsupported(f"spec.{field}", getattr(spec, field), choices)
    if spec.type == "ExternalName" and not spec.externalName:
        yield "spec.externalName", "Required value"
    if not spec.ports and spec.type != "ExternalName" and spec.clusterIP != "None":
        yield "spec.ports", "Required value"
    cluster_ips = spec.clusterIPs if spec.clusterIPs != ["None"] else None
    for address in (*(cluster_ips or ()), *(spec.externalIPs or ())):
        yield from _malformed("spec.clusterIPs", address, check.address)
    seen: set[str | tuple[str | None, int] | None] = set()
    ports = spec.ports or []
    for index, port in enumerate(ports):
        field = f"spec.ports[{index}]"
        yield from _port_problems(field, port.protocol, port.port)
        if len(ports) > 1 and not port.name:
            yield f"{field}.name", "Required value"
        number = (port.protocol, port.port)
        if seen & {port.name, number}:
            yield field, f'Duplicate value: "{port.name}" {port.protocol} {port.port}'
        seen |= {port.name, number}
        if port.nodePort and spec.type not in WITH_NODE_PORTS:
            yield f"{field}.nodePort", f"Forbidden: a {spec.type} service has no node ports"
        if port.nodePort and port.nodePort not in NODE_PORTS:
            yield f"{field}.nodePort", f"Invalid value: {port.nodePort}: must be 30000-32767"


def _slice_problems(endpoint_slice: wire.EndpointSlice) -> _Problems:
    family = endpoint_slice.addressType
    yield from _unsupported("addressType", family, ("FQDN", "IPv4", "IPv6"))
    endpoints = endpoint_slice.endpoints or []
    if len(endpoints) > 1000:
        yield "endpoints", f"Too many: {len(endpoints)}: must have at most 1000 items"
    for index, endpoint in enumerate(endpoints):
        field = f"endpoints[{index}].addresses"
        if not endpoint.addresses:
            yield field, "Required value: must contain at least 1 item"
        for address in endpoint.addresses or () if family != "FQDN" else ():
            yield from _malformed(field, address, partial(check.address_of, Family(family)))
    for index, port in enumerate(endpoint_slice.ports or []):
        yield from _port_problems(f"ports[{index}]", port.protocol, port.port)


def _pod_problems(spec: _PodSpec) -> _Problems:
    if not spec.containers:
        yield "spec.containers", "Required value"
    seen: set[str] = set()
    for group, containers in (("initContainers", spec.initContainers), ("containers", spec.containers)):
        for index, container in enumerate(containers or ()):
            field = f"spec.{group}[{index}]"
            yield from _malformed(f"{field}.name", container.name, check.label)
            if container.name in seen:
                yield f"{field}.name", f'Duplicate value: "{container.name}"'
            if not container.image:
                yield f"{field}.image", "Required value"
            seen.add(container.name)


def _port_problems(field: str, protocol: str | None, number: int | None) -> _Problems:
    yield from _unsupported(f"{field}.protocol", protocol, ("TCP", "UDP", "SCTP"))
    if number is not None and not 1 <= number <= 65535:
        yield f"{field}.port", f"Invalid value: {number}: must be 1-65535"


def _unsupported(field: str, value: str | None, choices: tuple[str, ...]) -> _Problems:
    if value is not None and value not in choices:
        yield field, f'Unsupported value: "{value}": supported values: {", ".join(choices)}'


def _malformed(field: str, value: str, rule: Callable[[str, str], str]) -> _Problems:
    try:
        rule(value, field)
    except ValueError as error:
        yield field, f'Invalid value: "{value}": {str(error).rpartition(", ")[2]}'
