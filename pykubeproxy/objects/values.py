"""The objects of the Kubernetes API as the rest of the program sees them: small, frozen, already checked."""

import enum
from typing import NamedTuple

import msgspec


class Family(enum.Enum):
    """An address family; the value is the one of EndpointSlice.addressType and of the metric label ip_family."""

    IPV4 = "IPv4"
    IPV6 = "IPv6"


class Protocol(enum.Enum):
    """A transport protocol as Kubernetes writes it."""

    TCP = "TCP"
    UDP = "UDP"
    SCTP = "SCTP"


class Kind(enum.Enum):
    """The kinds of objects that are watched."""

    SERVICE = "Service"
    ENDPOINT_SLICE = "EndpointSlice"
    NODE = "Node"


class Key(NamedTuple):
    """What identifies an object within its kind; the namespace of a Node is empty."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def family_of(address: str) -> Family:
    """The family of a canonical IP address or CIDR."""
    return Family.IPV6 if ":" in address else Family.IPV4


def address_and_port(address: str, port: int) -> str:
    """Such as 10.0.0.1:80 or [fd00::1]:80."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Refused(NamedTuple):
    """A legal address of an object that is not served all the same: its field, the address, and what it is.

    str() goes on from "Service ns/name: ".
    """

    field: str
    address: str
    reason: str

    def __str__(self) -> str:
        return f"{self.field} is {self.address}, {self.reason}: it is passed over"


class Port(msgspec.Struct, frozen=True, gc=False):
    """One entry of a Service's spec.ports; `name` may be empty, `node_port` is 0 when there is none."""

    name: str
    protocol: Protocol
    port: int
    node_port: int = 0


class Service(msgspec.Struct, frozen=True):
    """A Service.

    `load_balancer_ips` holds only addresses that a proxy serves: those of an ingress with ipMode Proxy are left out
    (KEP-1860). `affinity_seconds` is None without ClientIP affinity. `proxy_name` is the label
    service.kubernetes.io/service-proxy-name, with which a Service asks for another proxy; None if it is not there.
    `headless` means that clusterIP is None: clients go to the pods themselves. `refused` are addresses that were left
    out.
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
    refused: tuple[Refused, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)


class EndpointPort(msgspec.Struct, frozen=True, gc=False):
    """One entry of an EndpointSlice's ports; a name or port of None is to be ignored by proxies."""

    name: str | None
    protocol: Protocol
    port: int | None


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """One endpoint of an EndpointSlice, reduced to its first address; `address` is empty when it has none.

    Conditions that the API leaves out are filled in here: ready and serving are true, terminating is false.
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


class EndpointSlice(msgspec.Struct, frozen=True):
    """An EndpointSlice.

    `service` is the label kubernetes.io/service-name, empty if missing. `family` is None for slices of type FQDN.
    `headless` is the label service.kubernetes.io/headless. `trigger_time` is the annotation
    endpoints.kubernetes.io/last-change-trigger-time in seconds since 1970.
    `refused` are addresses of `endpoints` that are not to be used.
    """

    namespace: str
    name: str
    service: str
    family: Family | None
    endpoints: tuple[Endpoint, ...] = ()
    ports: tuple[EndpointPort, ...] = ()
    headless: bool = False
    trigger_time: float | None = None
    refused: tuple[Refused, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)

    @property
    def service_key(self) -> Key:
        return Key(self.namespace, self.service)


class Node(msgspec.Struct, frozen=True):
    """A Node: `addresses` are its InternalIPs followed by its ExternalIPs, `taints` the keys of its taints."""

    name: str
    addresses: tuple[str, ...] = ()
    pod_cidrs: tuple[str, ...] = ()
    zone: str = ""
    deleting: bool = False
    taints: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return Key("", self.name)


Object = Service | EndpointSlice | Node


def remark(object_: Object) -> str:
    """What of an object is never served although the API may have it, in one line; "" as a rule."""
    if isinstance(object_, Node) or not object_.refused:
        return ""
    more = len(object_.refused) - 1
    others = f", and so are {more} others" if more > 1 else ", and so is another" if more else ""
    return f"{type(object_).__name__} {object_.key}: {object_.refused[0]}{others}"
