"""Pods: the fields that commands read. The agent watches no Pods."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from pykubeproxy.objects import check
from pykubeproxy.objects.check import accepted
from pykubeproxy.objects.decode import WireMetadata, timestamp
from pykubeproxy.objects.values import EndpointPort, Key, RejectedValue

_FINISHED = ("Succeeded", "Failed")
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"


class Container(NamedTuple):
    """A container of a Pod.

    `command` is its command and arguments, as far as the Pod sets them; `running_since` is in seconds since 1970;
    `problem` is why it does not run, or "".
    """

    name: str
    image: str = ""
    command: tuple[str, ...] = ()
    ready: bool = False
    restarts: int = 0
    running_since: float | None = None
    problem: str = ""


class Pod(msgspec.Struct, frozen=True):
    """A Pod of the API, or what the EndpointSlices of Services tell about it.

    - `addresses`: its IPs, the primary one first
    - `node`: the name of its Node, "" if it has none yet
    - `host_network`: it uses the addresses of its node
    - `phase`: "" if unknown; `reason` is why it is in that phase, or ""
    - `ports`: the ports of its containers, or those of EndpointSlices
    - `default_container`: the container that kubectl would choose, "" for the first

    EndpointSlices tell only the fields up to `ports`.
    """

    namespace: str
    name: str
    addresses: tuple[str, ...] = ()
    node: str = ""
    host_network: bool = False
    ready: bool = True
    phase: str = ""
    ports: tuple[EndpointPort, ...] = ()
    labels: Mapping[str, str] = {}
    reason: str = ""
    deleting: bool = False
    default_container: str = ""
    containers: tuple[Container, ...] = ()

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)

    @property
    def runs(self) -> bool:
        """Whether commands can run in it."""
        return self.phase == "Running" and not self.deleting

    @property
    def finished(self) -> bool:
        """Whether all containers have ended for good: another Pod may have its addresses now."""
        return self.phase in _FINISHED


class _WirePodAddress(msgspec.Struct, gc=False):
    ip: str = ""


class _WirePodCondition(msgspec.Struct, gc=False):
    type: str
    status: str


class _WirePodPort(msgspec.Struct, gc=False):
    containerPort: int  # noqa: N815
    name: str | None = None
    protocol: str | None = None


class _WireContainer(msgspec.Struct, gc=False):
    name: str = ""
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    ports: list[_WirePodPort] | None = None


class _WirePodSpec(msgspec.Struct, gc=False):
    nodeName: str | None = None  # noqa: N815
    hostNetwork: bool | None = None  # noqa: N815
    containers: list[_WireContainer] | None = None


class _WirePodStateDetail(msgspec.Struct, gc=False):
    reason: str | None = None
    message: str | None = None
    startedAt: str | None = None  # noqa: N815


class _WirePodState(msgspec.Struct, gc=False):
    waiting: _WirePodStateDetail | None = None
    running: _WirePodStateDetail | None = None
    terminated: _WirePodStateDetail | None = None


class _WireContainerStatus(msgspec.Struct, gc=False):
    name: str
    ready: bool = False
    restartCount: int = 0  # noqa: N815
    state: _WirePodState | None = None


class _WirePodStatus(msgspec.Struct, gc=False):
    phase: str | None = None
    reason: str | None = None
    message: str | None = None
    podIP: str | None = None  # noqa: N815
    podIPs: list[_WirePodAddress] | None = None  # noqa: N815
    conditions: list[_WirePodCondition] | None = None
    containerStatuses: list[_WireContainerStatus] | None = None  # noqa: N815


class _WirePod(msgspec.Struct, gc=False):
    metadata: WireMetadata
    spec: _WirePodSpec
    status: _WirePodStatus | None = None


_pods = msgspec.json.Decoder(_WirePod)


def decode_pod(raw: bytes | msgspec.Raw) -> Pod:
    """Decode one Pod of the API; skip invalid addresses. Raises ValueError if the Pod is unusable."""
    try:
        pod = _pods.decode(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    meta, spec, status = pod.metadata, pod.spec, pod.status or _WirePodStatus()
    rejected: list[RejectedValue] = []
    ips = [address.ip for address in status.podIPs or ()] or [status.podIP or ""]
    statuses = {entry.name: entry for entry in status.containerStatuses or ()}
    return Pod(
        namespace=check.label(meta.namespace or "default", "metadata.namespace"),
        name=check.subdomain(meta.name, "metadata.name"),
        addresses=accepted(
            "status.podIPs", enumerate(filter(None, ips)), partial(check.address, field=""), rejected
        ),
        node=spec.nodeName or "",
        host_network=spec.hostNetwork is True,
        ready=any(
            condition.type == "Ready" and condition.status == "True" for condition in status.conditions or ()
        ),
        phase=status.phase or "",
        ports=tuple(_port(port) for container in spec.containers or () for port in container.ports or ()),
        labels=meta.labels or {},
        reason=_joined(status.reason, status.message),
        deleting=meta.deletionTimestamp is not None,
        default_container=(meta.annotations or {}).get(_DEFAULT_CONTAINER, ""),
        containers=tuple(
            _container(container, statuses.get(container.name)) for container in spec.containers or ()
        ),
    )


def _port(port: _WirePodPort) -> EndpointPort:
    return EndpointPort(
        name=port.name or "",
        protocol=check.protocol(port.protocol, "spec.containers.ports.protocol"),
        port=port.containerPort,
    )


def _container(spec: _WireContainer, status: _WireContainerStatus | None) -> Container:
    command = (*(spec.command or ()), *(spec.args or ()))
    status = status or _WireContainerStatus(spec.name)
    state = status.state or _WirePodState()
    stopped = state.waiting or state.terminated
    return Container(
        name=spec.name,
        image=spec.image or "",
        command=command,
        ready=status.ready,
        restarts=status.restartCount,
        running_since=timestamp(state.running.startedAt) if state.running else None,
        problem=_joined(stopped.reason, stopped.message) if stopped else "",
    )


def _joined(reason: str | None, message: str | None) -> str:
    """Return what a kubelet says, in one printable line."""
    text = ": ".join(filter(None, (reason, message)))
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
