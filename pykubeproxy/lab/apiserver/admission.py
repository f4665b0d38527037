"""Complete and check what clients write, as a real API server does.

Defaults, cluster IPs and node ports are added in place. Checks cover the fields a proxy reads: wrong types, missing or
invalid values. They are lenient elsewhere: unknown fields are kept, and a cluster IP may lie outside the service CIDRs.
"""

import ipaddress
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from pykubeproxy.lab.apiserver.resources import (
    ENDPOINT_SLICES,
    NODE_STATUS,
    NODES,
    PODS,
    SERVICES,
    ApiError,
    JsonObject,
    Resource,
    invalid,
)
from pykubeproxy.objects import Family, check
from pykubeproxy.objects.decode import WireEndpointSlice, WireMetadata, WireNode, WireService, WireServiceSpec

Claim = str | int  # an IP address in its canonical form, or a node port

NODE_PORTS = range(30000, 32768)
_RESERVED_PORTS = 86
_NOT_ALLOCATED = "Internal error occurred: failed to allocate a"
WITH_NODE_PORTS = ("NodePort", "LoadBalancer")
_POLICIES = ("Cluster", "Local")
_CHOICES = {
    "type": ("ClusterIP", *WITH_NODE_PORTS, "ExternalName"),
    "sessionAffinity": ("ClientIP", "None"),
    "internalTrafficPolicy": _POLICIES,
    "externalTrafficPolicy": _POLICIES,
}
_Problems = Iterator[tuple[str, str]]  # field and reason
_ADDRESS_FIELDS = ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy")


class Allocations:
    """The cluster IPs and node ports in use, each by one owner (an object's path).

    As on a real server, the low end of each range is left to explicit requests. Addresses outside the ranges may be
    claimed too.
    """

    def __init__(self, service_cidrs: Sequence[str]) -> None:
        networks = [ipaddress.ip_network(cidr) for cidr in service_cidrs]
        self._addresses = {f"IPv{network.version}": _addresses(network) for network in networks}
        self._ports = _rotation(NODE_PORTS, _RESERVED_PORTS)
        self._owners: dict[Claim, str] = {}
        self._claims: dict[str, frozenset[Claim]] = {}

    @property
    def families(self) -> list[str]:
        """The families with a range of cluster IPs, the cluster's primary one first."""
        return list(self._addresses)

    def taken(self, claim: Claim, owner: str) -> bool:
        """Return whether another owner has it."""
        return self._owners.get(claim, owner) != owner

    def next_address(self, family: str) -> str:
        """Return a free cluster IP of a family (IPv4 or IPv6) without claiming it. Raise a 500 if none is left."""
        size, rotation = self._addresses[family]
        for address in itertools.islice(rotation, size):
            if address not in self._owners:
                return address
        raise ApiError(500, f"{_NOT_ALLOCATED} serviceIP: {family} range is full")

    def next_port(self, excluded: set[int]) -> int:
        """Return a free node port without claiming it. Raise a 500 if none is left."""
        for port in itertools.islice(self._ports, len(NODE_PORTS)):
            if port not in excluded and port not in self._owners:
                return port
        raise ApiError(500, f"{_NOT_ALLOCATED} nodePort: all are in use")

    def settle(self, owner: str, claims: frozenset[Claim]) -> None:
        """Make `claims` all that an owner has; free the rest."""
        for claim in self._claims.pop(owner, frozenset()) - claims:
            if self._owners.get(claim) == owner:
                del self._owners[claim]
        if claims:
            self._claims[owner] = claims
            self._owners.update(dict.fromkeys(claims, owner))


def _rotation(numbers: range, reserved: int) -> Iterator[int]:
    """Yield the numbers again and again, so that one that was freed is not used again at once; the low ones last."""
    return itertools.cycle(itertools.chain(numbers[reserved:], numbers[:reserved]))


def _addresses(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> tuple[int, Iterator[str]]:
    """Return how many addresses Services may get, and these in turn."""
    size = min(network.num_addresses - (2 if network.version == 4 else 1), 1 << 20)
    offsets = _rotation(range(1, size + 1), min(max(16, size // 16), 256, size // 2))
    return size, (str(network[offset]) for offset in offsets)


class _ServiceSpecFields(WireServiceSpec):
    selector: dict[str, str] | None = None
    externalName: str | None = None  # noqa: N815
    ipFamilies: list[str] | None = None  # noqa: N815
    ipFamilyPolicy: str | None = None  # noqa: N815


class _ServiceFields(WireService, kw_only=True):
    spec: _ServiceSpecFields


class _ContainerFields(msgspec.Struct):
    name: str = ""
    image: str = ""
    command: list[str] | None = None
    args: list[str] | None = None


class _PodSpecFields(msgspec.Struct):
    containers: list[_ContainerFields] | None = None
    initContainers: list[_ContainerFields] | None = None  # noqa: N815
    nodeName: str | None = None  # noqa: N815
    hostNetwork: bool | None = None  # noqa: N815
    terminationGracePeriodSeconds: int | None = None  # noqa: N815


class _PodFields(msgspec.Struct):
    metadata: WireMetadata
    spec: _PodSpecFields


class _OtherFields(msgspec.Struct):
    metadata: WireMetadata


_Typed = _ServiceFields | WireEndpointSlice | WireNode | _PodFields | _OtherFields
_TYPES: dict[Resource, type[_Typed]] = {
    SERVICES: _ServiceFields,
    ENDPOINT_SLICES: WireEndpointSlice,
    NODES: WireNode,
    PODS: _PodFields,
}


def check_types(resource: Resource, item: JsonObject) -> _Typed:
    """Return the fields we know. Raise a 400 if one has the wrong type."""
    try:
        return msgspec.convert(item, _TYPES.get(resource, _OtherFields))
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
    if isinstance(typed, _ServiceFields):
        yield from _service_problems(typed.spec)
    elif isinstance(typed, WireEndpointSlice):
        yield from _slice_problems(typed)
    elif isinstance(typed, _PodFields):
        yield from _pod_problems(typed.spec)


def _service_problems(spec: _ServiceSpecFields) -> _Problems:
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


def _slice_problems(endpoint_slice: WireEndpointSlice) -> _Problems:
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


def _pod_problems(spec: _PodSpecFields) -> _Problems:
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


_POD_SPEC: JsonObject = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "serviceAccountName": "default",
}


def admit(
    resource: Resource, item: JsonObject, old: JsonObject | None, path: str, in_use: Allocations
) -> None:
    """Fill in an object and check it. Raise a 400 or 422. `old` is None when it is created."""
    item["metadata"].setdefault("name", "")
    for field, value in msgspec.json.decode(resource.blank).items():
        item.setdefault(field, value)
    check_types(resource, item)
    if resource is SERVICES:
        _ServiceDefaults(item, old, path, in_use).fill()
    elif resource is ENDPOINT_SLICES:
        _fill_slice(item, old)
    elif resource is NODES:
        _fill_node(item)
    elif resource is PODS:
        _fill_pod(item)
    check_values(resource, item)


def claims(service: JsonObject) -> frozenset[Claim]:
    """Return the cluster IPs and node ports of a service; none if it was stored with a wrong type."""
    try:
        spec = service["spec"]
        addresses = [check.address(ip, "clusterIPs") for ip in spec.get("clusterIPs", []) if ip != "None"]
        ports = [port.get("nodePort") for port in spec.get("ports", [])]
        return frozenset(filter(None, [*addresses, *ports, spec.get("healthCheckNodePort")]))
    except (AttributeError, KeyError, TypeError, ValueError):
        return frozenset()


def _fill_slice(item: JsonObject, old: JsonObject | None) -> None:
    for port in item["ports"] or []:
        port.setdefault("name", "")
        port.setdefault("protocol", "TCP")
    if old is not None and old.get("addressType") != item["addressType"]:
        raise invalid(ENDPOINT_SLICES, item["metadata"]["name"], "addressType", "field is immutable")


def _fill_node(item: JsonObject) -> None:
    spec = item["spec"]
    if spec.get("podCIDRs"):
        spec.setdefault("podCIDR", spec["podCIDRs"][0])
    elif spec.get("podCIDR"):
        spec["podCIDRs"] = [spec["podCIDR"]]
    status = item["status"] = NODE_STATUS | item["status"]
    status["nodeInfo"] = NODE_STATUS["nodeInfo"] | status["nodeInfo"]


def _fill_pod(item: JsonObject) -> None:
    for field, value in _POD_SPEC.items():
        item["spec"].setdefault(field, value)
    item["status"].setdefault("phase", "Pending")


class _ServiceDefaults:
    """Fills in one service."""

    def __init__(self, item: JsonObject, old: JsonObject | None, path: str, in_use: Allocations) -> None:
        self._item = item
        self._spec: JsonObject = item["spec"]
        self._ports: list[JsonObject] = self._spec.get("ports", [])
        self._before: JsonObject = old["spec"] if old else {}
        self._path = path
        self._in_use = in_use

    def fill(self) -> None:
        """Add what is missing. Raise a 422 for an address or port that cannot be allocated."""
        spec = self._spec
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        if spec["sessionAffinity"] == "ClientIP":
            client_ip = spec.setdefault("sessionAffinityConfig", {}).setdefault("clientIP", {})
            client_ip.setdefault("timeoutSeconds", 10800)
        else:
            spec.pop("sessionAffinityConfig", None)
        for port in self._ports:
            port.setdefault("protocol", "TCP")
            port["targetPort"] = port.get("targetPort") or port["port"]
        self._inherit()
        if spec["type"] != "ExternalName":
            spec.setdefault("internalTrafficPolicy", "Cluster")
            self._fill_cluster_ips()
        if self._externally_accessible:
            spec.setdefault("externalTrafficPolicy", "Cluster")
        if spec["type"] == "LoadBalancer":
            spec.setdefault("allocateLoadBalancerNodePorts", True)
        self._fill_node_ports()
        for ingress in self._item["status"].setdefault("loadBalancer", {}).get("ingress", []):
            if ingress.get("ip"):
                ingress.setdefault("ipMode", "VIP")

    @property
    def _externally_accessible(self) -> bool:
        with_external_ips = self._spec["type"] == "ClusterIP" and bool(self._spec.get("externalIPs"))
        return self._spec["type"] in WITH_NODE_PORTS or with_external_ips

    @property
    def _has_health_check(self) -> bool:
        spec = self._spec
        return spec["type"] == "LoadBalancer" and spec.get("externalTrafficPolicy") == "Local"

    def _inherit(self) -> None:
        """Keep what was allocated if a replacement leaves it out; drop unchanged fields that only the old type has."""
        spec, before = self._spec, self._before
        kept = dict.fromkeys(_ADDRESS_FIELDS, spec["type"] != "ExternalName")
        kept["healthCheckNodePort"] = self._has_health_check
        dropped = {field for field, keep in kept.items() if not keep}
        if not self._externally_accessible:
            dropped.add("externalTrafficPolicy")
        if spec["type"] != "LoadBalancer":
            dropped.add("allocateLoadBalancerNodePorts")
        for field, value in before.items():
            if kept.get(field):
                spec.setdefault(field, value)
            elif field in dropped and spec.get(field) == value:
                del spec[field]
        old_ports = before.get("ports", [])
        allocated = {port.get("name", ""): port["nodePort"] for port in old_ports if port.get("nodePort")}
        requested = {port.get("nodePort") for port in self._ports}
        for port in self._ports:
            if spec["type"] not in WITH_NODE_PORTS and port.get("nodePort") in allocated.values():
                del port["nodePort"]
            elif spec["type"] in WITH_NODE_PORTS and not port.get("nodePort"):
                number = allocated.get(port.get("name", ""))
                if number and number not in requested:
                    port["nodePort"] = number

    def _fill_cluster_ips(self) -> None:
        spec, before = self._spec, self._before
        addresses = list(spec.get("clusterIPs") or filter(None, [spec.get("clusterIP")]))
        old = before.get("clusterIP")
        if old and before.get("type") != "ExternalName" and spec.get("clusterIP", old) != old:
            reason = f'Invalid value: ["{spec["clusterIP"]}"]: may not change once set'
            raise self._invalid("spec.clusterIPs[0]", reason)
        headless = addresses == ["None"]
        if headless and not spec.get("selector") and "ipFamilyPolicy" not in spec:
            dual_stack = len(self._in_use.families) > 1
            spec["ipFamilyPolicy"] = "RequireDualStack" if dual_stack else "SingleStack"
        families = spec["ipFamilies"] = self._families([] if headless else addresses)
        if not headless:
            requested = [*addresses, *[""] * len(families)]
            addresses = [self._address(family, requested[i]) for i, family in enumerate(families)]
        spec["clusterIP"], spec["clusterIPs"] = addresses[0], addresses

    def _families(self, addresses: list[str]) -> list[str]:
        """Return the families in order: those requested, those of the addresses, or the cluster's first."""
        available = self._in_use.families
        of_addresses = ["IPv6" if ":" in address else "IPv4" for address in addresses]
        families = list(self._spec.get("ipFamilies") or of_addresses or available[:1])
        default = "SingleStack" if len(families) < 2 else "RequireDualStack"
        policy = self._spec.setdefault("ipFamilyPolicy", default)
        if policy == "SingleStack":
            families = families[:1]
        else:
            families += [family for family in available if family not in families]
        if set(families) - set(available) or (policy == "RequireDualStack" and len(families) < 2):
            reason = f'Invalid value: "{policy}": this cluster has service addresses of {", ".join(available)} only'
            raise self._invalid("spec.ipFamilyPolicy", reason)
        return families

    def _address(self, family: str, requested: str) -> str:
        """Return the requested address or, for "", the next free one."""
        try:
            address = check.address_of(
                Family(family), requested or self._in_use.next_address(family), "the address"
            )
        except ValueError as error:
            raise self._invalid("spec.clusterIPs", f"Invalid value: {error}") from error
        if self._in_use.taken(address, self._path):
            reason = f"failed to allocate IP {address}: provided IP is already allocated"
            raise self._invalid("spec.clusterIPs", f'Invalid value: ["{address}"]: {reason}')
        return address

    def _fill_node_ports(self) -> None:
        spec = self._spec
        allocated = {port.get("port"): port["nodePort"] for port in self._ports if port.get("nodePort")}
        numbers = {port["nodePort"] for port in self._ports if port.get("nodePort")}
        if self._has_health_check and spec.get("healthCheckNodePort"):
            numbers.add(spec["healthCheckNodePort"])
        for number in numbers:
            if self._in_use.taken(number, self._path):
                reason = f"Invalid value: {number}: provided port is already allocated"
                raise self._invalid("spec.ports[0].nodePort", reason)
        if spec["type"] == "NodePort" or spec.get("allocateLoadBalancerNodePorts") is True:
            for port in self._ports:
                if not port.get("nodePort"):
                    # One port number under two protocols, as of a DNS service, gets one node port.
                    number = allocated.get(port["port"]) or self._next_port(numbers)
                    port["nodePort"] = allocated[port["port"]] = number
        if self._has_health_check and not spec.get("healthCheckNodePort"):
            spec["healthCheckNodePort"] = self._next_port(numbers)

    def _next_port(self, numbers: set[int]) -> int:
        """Allocate a node port and add it to `numbers`."""
        number = self._in_use.next_port(numbers)
        numbers.add(number)
        return number

    def _invalid(self, field: str, reason: str) -> ApiError:
        return invalid(SERVICES, self._item["metadata"]["name"], field, reason)
