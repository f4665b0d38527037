"""Validated, frozen values of the Kubernetes objects this program reads, and events about them."""

import enum
from collections.abc import Iterable
from typing import NamedTuple

import msgspec


class Family(enum.Enum):
    """An address family, with the values of EndpointSlice.addressType and of the metric label ip_family."""

    IPV4 = "IPv4"
    IPV6 = "IPv6"

    # That of Enum is a Python function, and each object has a family.
    __hash__ = object.__hash__


class Protocol(enum.Enum):
    """A transport protocol, spelled as in Kubernetes."""

    TCP = "TCP"
    UDP = "UDP"
    SCTP = "SCTP"


class Kind(enum.Enum):
    """A watched kind of object."""

    SERVICE = "Service"
    ENDPOINT_SLICE = "EndpointSlice"
    NODE = "Node"

    @property
    def api_version(self) -> str:
        return "discovery.k8s.io/v1" if self is Kind.ENDPOINT_SLICE else "v1"

    @property
    def plural(self) -> str:
        """The name of the resource in the API, such as "endpointslices"."""
        return f"{self.value.lower()}s"


class Key(NamedTuple):
    """The identity of an object within its kind; the namespace of a Node is empty."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def family_of(address: str) -> Family:
    """Return the family of a canonical IP address or CIDR."""
    return Family.IPV6 if ":" in address else Family.IPV4


def of_family(texts: Iterable[str], family: Family) -> tuple[str, ...]:
    """Return the canonical IP addresses and CIDRs of one family."""
    return tuple([text for text in texts if family_of(text) is family])


def address_and_port(address: str, port: int) -> str:
    """Return text such as 10.0.0.1:80 or [fd00::1]:80."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class RejectedValue(NamedTuple):
    """An invalid value of a field. It costs only `skipped`, the part of the object around it, such as "the port".

    `reason`, e.g. "not an IP address" or "a loopback address".
    """

    field: str
    value: str | int
    reason: str
    skipped: str = "it"

    def is_in(self, field: str) -> bool:
        """Return whether the value is part of an entry of a list, such as "spec.clusterIPs"."""
        return self.field.startswith(f"{field}[")

    def __str__(self) -> str:
        return f"{self.field} is {self.value!r}, {self.reason}: {self.skipped} is skipped"


class Port(msgspec.Struct, frozen=True, gc=False):
    """One entry of a Service's spec.ports. `name` may be empty; `node_port` is 0 if unset."""

    name: str
    protocol: Protocol
    port: int
    node_port: int = 0


class Service(msgspec.Struct, frozen=True, gc=False):
    """A Service.

    - `load_balancer_ips`: without those of ipMode Proxy (KEP-1860)
    - `affinity_seconds`: None without ClientIP affinity
    - `proxy_name`: the label service.kubernetes.io/service-proxy-name, None if missing
    - `headless`: clusterIP is "None"
    - `created`: metadata.creationTimestamp in seconds since 1970, 0 if unknown
    - `rejected`: values that the other fields omit
    - `uid`: for events about it, "" if unknown
    """

    namespace: str
    name: str
    type: str = "ClusterIP"
    cluster_ips: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()
    external_ips: tuple[str, ...] = ()
    load_balancer_ips: tuple[str, ...] = ()
    source_ranges: tuple[str, ...] = ()
    internal_local: bool = False
    external_local: bool = False
    affinity_seconds: int | None = None
    health_check_node_port: int = 0
    proxy_name: str | None = None
    headless: bool = False
    rejected: tuple[RejectedValue, ...] = ()
    uid: str = ""
    created: float = 0.0

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)


class EndpointPort(msgspec.Struct, frozen=True, gc=False):
    """One entry of an EndpointSlice's ports. Proxies ignore entries whose name or port is None."""

    name: str | None
    protocol: Protocol
    port: int | None


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """One endpoint of an EndpointSlice with its first address, "" if it has none.

    Missing conditions default to ready, serving and not terminating.
    """

    address: str
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    node_name: str = ""
    zone: str = ""
    zone_hints: tuple[str, ...] = ()
    node_hints: tuple[str, ...] = ()
    pod: str = ""


class EndpointSlice(msgspec.Struct, frozen=True, gc=False):
    """An EndpointSlice.

    - `service`: the label kubernetes.io/service-name, "" if missing
    - `family`: None for addressType FQDN
    - `headless`: the label service.kubernetes.io/headless is set
    - `trigger_time`: the annotation endpoints.kubernetes.io/last-change-trigger-time in seconds since 1970
    - `rejected`: values for which `endpoints` and `ports` omit an entry
    """

    namespace: str
    name: str
    service: str
    family: Family | None
    endpoints: tuple[Endpoint, ...] = ()
    ports: tuple[EndpointPort, ...] = ()
    headless: bool = False
    trigger_time: float | None = None
    rejected: tuple[RejectedValue, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)

    @property
    def service_key(self) -> Key:
        return Key(self.namespace, self.service)


class Node(msgspec.Struct, frozen=True, gc=False):
    """A Node.

    - `addresses`: its InternalIPs, then its ExternalIPs
    - `taints`: the keys of its taints
    - `rejected`: values that the other fields omit
    - `os`: its operating system, such as "linux" or "windows", "" if unknown
    - `kernel`: the release of its kernel, such as "6.12.0-55.el10", "" if unknown
    """

    name: str
    addresses: tuple[str, ...] = ()
    pod_cidrs: tuple[str, ...] = ()
    zone: str = ""
    deleting: bool = False
    taints: tuple[str, ...] = ()
    rejected: tuple[RejectedValue, ...] = ()
    os: str = ""
    kernel: str = ""

    @property
    def key(self) -> Key:
        return Key("", self.name)


Object = Service | EndpointSlice | Node


class Listed(msgspec.Struct, frozen=True):
    """All objects of a kind; any other one has been deleted."""

    kind: Kind
    objects: tuple[Object, ...]


class Updated(msgspec.Struct, frozen=True):
    """One object, added or updated. `replaced` is the oldest trigger time of earlier events that this one replaces."""

    object: Object
    replaced: float | None = None

    def trigger_times(self) -> tuple[float, ...]:
        """Return the trigger time of the oldest replaced event, if any, and that of this one, if any."""
        own = self.object.trigger_time if isinstance(self.object, EndpointSlice) else None
        return tuple(time for time in (self.replaced, own) if time is not None)


class Deleted(msgspec.Struct, frozen=True):
    """One object that was deleted or can no longer be decoded. `too_large` says why an object cannot be read; else ""."""

    kind: Kind
    key: Key
    too_large: str = ""


Event = Listed | Updated | Deleted


def rejection_warning(object_: Object) -> str:
    """Return one line about the rejected values of an object; "" if it has none."""
    if not object_.rejected:
        return ""
    first, *others = object_.rejected
    more = f", and {len(others)} more" if others else ""
    return f"{type(object_).__name__} {object_.key}: {first}{more}"
