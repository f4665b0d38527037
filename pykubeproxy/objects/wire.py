"""The JSON of the Kubernetes API as msgspec structs, with the field names of the API.

Fields that may be missing or null have a default. msgspec skips unknown fields.
"""

import msgspec


class Metadata(msgspec.Struct, gc=False):
    name: str
    namespace: str | None = None
    uid: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creationTimestamp: str | None = None  # noqa: N815
    deletionTimestamp: str | None = None  # noqa: N815


class Port(msgspec.Struct, gc=False):
    port: int
    name: str | None = None
    protocol: str | None = None
    nodePort: int | None = None  # noqa: N815


class ClientIP(msgspec.Struct, gc=False):
    timeoutSeconds: int | None = None  # noqa: N815


class SessionAffinityConfig(msgspec.Struct, gc=False):
    clientIP: ClientIP | None = None  # noqa: N815


class ServiceSpec(msgspec.Struct, gc=False):
    type: str | None = None
    clusterIP: str | None = None  # noqa: N815
    clusterIPs: list[str] | None = None  # noqa: N815
    ports: list[Port] | None = None
    externalIPs: list[str] | None = None  # noqa: N815
    loadBalancerSourceRanges: list[str] | None = None  # noqa: N815
    internalTrafficPolicy: str | None = None  # noqa: N815
    externalTrafficPolicy: str | None = None  # noqa: N815
    sessionAffinity: str | None = None  # noqa: N815
    sessionAffinityConfig: SessionAffinityConfig | None = None  # noqa: N815
    healthCheckNodePort: int | None = None  # noqa: N815


class Ingress(msgspec.Struct, gc=False):
    ip: str | None = None
    ipMode: str | None = None  # noqa: N815


class LoadBalancerStatus(msgspec.Struct, gc=False):
    ingress: list[Ingress] | None = None


class ServiceStatus(msgspec.Struct, gc=False):
    loadBalancer: LoadBalancerStatus | None = None  # noqa: N815


class Service(msgspec.Struct, gc=False):
    metadata: Metadata
    spec: ServiceSpec
    status: ServiceStatus | None = None


class Conditions(msgspec.Struct, gc=False):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Named(msgspec.Struct, gc=False):
    name: str


class Hints(msgspec.Struct, gc=False):
    forZones: list[Named] | None = None  # noqa: N815
    forNodes: list[Named] | None = None  # noqa: N815


class TargetRef(msgspec.Struct, gc=False):
    name: str | None = None


class Endpoint(msgspec.Struct, gc=False):
    addresses: list[str] | None = None
    conditions: Conditions | None = None
    nodeName: str | None = None  # noqa: N815
    zone: str | None = None
    hints: Hints | None = None
    targetRef: TargetRef | None = None  # noqa: N815


class EndpointPort(msgspec.Struct, gc=False):
    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, gc=False):
    metadata: Metadata
    addressType: str  # noqa: N815
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


class NodeAddress(msgspec.Struct, gc=False):
    type: str
    address: str


class Taint(msgspec.Struct, gc=False):
    key: str


class NodeSpec(msgspec.Struct, gc=False):
    podCIDR: str | None = None  # noqa: N815
    podCIDRs: list[str] | None = None  # noqa: N815
    taints: list[Taint] | None = None


class NodeStatus(msgspec.Struct, gc=False):
    addresses: list[NodeAddress] | None = None


class Node(msgspec.Struct, gc=False):
    metadata: Metadata
    spec: NodeSpec | None = None
    status: NodeStatus | None = None
