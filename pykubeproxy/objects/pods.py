"""Pods: the fields that commands read. The agent watches no Pods."""

import msgspec

from pykubeproxy.objects import check, wire
from pykubeproxy.objects.entries import accepted
from pykubeproxy.objects.values import EndpointPort, Key, RejectedValue

_FINISHED = ("Succeeded", "Failed")


class KnownPod(msgspec.Struct, frozen=True):
    """A Pod, or what the EndpointSlices of Services tell about it.

    - `addresses`: its IPs, the primary one first
    - `node`: the name of its Node, "" if it has none yet
    - `host_network`: it uses the addresses of its node
    - `phase`: "" if unknown
    - `ports`: the ports of its containers, or those of EndpointSlices
    """

    namespace: str
    name: str
    addresses: tuple[str, ...] = ()
    node: str = ""
    host_network: bool = False
    ready: bool = True
    phase: str = ""
    ports: tuple[EndpointPort, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)

    @property
    def finished(self) -> bool:
        """Whether all containers have ended for good: another Pod may have its addresses now."""
        return self.phase in _FINISHED


class _Address(msgspec.Struct, gc=False):
    ip: str = ""


class _Condition(msgspec.Struct, gc=False):
    type: str
    status: str


class _Port(msgspec.Struct, gc=False):
    containerPort: int  # noqa: N815
    name: str | None = None
    protocol: str | None = None


class _Container(msgspec.Struct, gc=False):
    ports: list[_Port] | None = None


class _Spec(msgspec.Struct, gc=False):
    nodeName: str | None = None  # noqa: N815
    hostNetwork: bool | None = None  # noqa: N815
    containers: list[_Container] | None = None


class _Status(msgspec.Struct, gc=False):
    phase: str | None = None
    podIP: str | None = None  # noqa: N815
    podIPs: list[_Address] | None = None  # noqa: N815
    conditions: list[_Condition] | None = None


class _Pod(msgspec.Struct, gc=False):
    metadata: wire.Metadata
    spec: _Spec
    status: _Status | None = None


_pods = msgspec.json.Decoder(_Pod)


def decode_pod(raw: bytes | msgspec.Raw) -> KnownPod:
    """Decode one Pod of the API; skip invalid addresses. Raises ValueError if the Pod is unusable."""
    try:
        pod = _pods.decode(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    status = pod.status or _Status()
    rejected: list[RejectedValue] = []
    ips = [it.ip for it in status.podIPs or ()] or [status.podIP or ""]
    return KnownPod(
        namespace=check.label(pod.metadata.namespace or "default", "metadata.namespace"),
        name=check.subdomain(pod.metadata.name, "metadata.name"),
        addresses=accepted((("status.podIPs", ip) for ip in ips if ip), check.address, rejected),
        node=pod.spec.nodeName or "",
        host_network=pod.spec.hostNetwork is True,
        ready=any(it.type == "Ready" and it.status == "True" for it in status.conditions or ()),
        phase=status.phase or "",
        ports=tuple(_port(port) for it in pod.spec.containers or () for port in it.ports or ()),
    )


def _port(port: _Port) -> EndpointPort:
    return EndpointPort(
        name=port.name or "",
        protocol=check.protocol(port.protocol, "spec.containers.ports.protocol"),
        port=port.containerPort,
    )
