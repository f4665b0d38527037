"""Pods: list, read, create and delete them."""

import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Expired, Failure

_PAGE_SIZE = 500
_SECONDS = 60.0  # for a page
_MAX_PAGE = 256 << 20  # bytes


class PodContainer(NamedTuple):
    """A container of a pod.

    `command` is its command and arguments; `running_since` is in seconds since 1970; `problem` is why it does not run,
    or "".
    """

    name: str
    image: str
    command: tuple[str, ...] = ()
    ready: bool = False
    restarts: int = 0
    running_since: float | None = None
    problem: str = ""


class Pod(msgspec.Struct, frozen=True):
    """A Pod and how its containers run. `reason` is why it is in its phase, as far as known, or ""."""

    namespace: str
    name: str
    node: str = ""
    labels: Mapping[str, str] = {}
    default_container: str = ""
    phase: str = ""
    reason: str = ""
    deleting: bool = False
    containers: tuple[PodContainer, ...] = ()

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def runs(self) -> bool:
        """Whether commands can run in it."""
        return self.phase == "Running" and not self.deleting


def list_pods(client: Client, selector: str, *, namespace: str = "", node: str = "") -> tuple[Pod, ...]:
    """Return the pods with these labels, in all namespaces by default. Raises Failure."""
    query: dict[str, str | int] = {"limit": _PAGE_SIZE, "labelSelector": selector}
    if node:
        query["fieldSelector"] = f"spec.nodeName={node}"
    pods: list[Pod] = []
    end = time.monotonic() + _SECONDS
    while True:
        try:
            with client.stream(
                _path(namespace),
                query,
                resource="pods",
                verbs="get and list of",
                idle=_SECONDS,
                end=end,
                compressible=True,
            ) as body:
                page = _decoded(body, _Page)
        except Expired:
            query.pop("continue", None)
            pods.clear()
            continue
        pods += map(_pod, page.items)
        if not page.metadata.next:
            return tuple(pods)
        query["continue"] = page.metadata.next


def get_pod(client: Client, namespace: str, name: str) -> Pod:
    """Return a pod. Raises Failure."""
    end = time.monotonic() + _SECONDS
    with client.stream(
        _path(namespace, name), {}, resource=f"pod {name}", verbs="get of", idle=_SECONDS, end=end
    ) as body:
        return _pod(_decoded(body, _Pod))


def create_pod(client: Client, namespace: str, body: Mapping[str, object]) -> Pod:
    """Create a pod and return it. Raises Failure."""
    created = client.post(_path(namespace), body, resource="pods", idle=_SECONDS)
    try:
        return _pod(msgspec.json.decode(created, type=_Pod))
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent an invalid pod: {error}") from None


def delete_pod(client: Client, namespace: str, name: str) -> None:
    """Delete a pod at once. Raises Failure."""
    client.delete(_path(namespace, name), {"gracePeriodSeconds": 0}, resource=f"pod {name}", idle=_SECONDS)


class _Metadata(msgspec.Struct):
    name: str
    namespace: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletionTimestamp: str | None = None  # noqa: N815


class _ContainerSpec(msgspec.Struct):
    name: str
    image: str = ""
    command: list[str] | None = None
    args: list[str] | None = None


class _Spec(msgspec.Struct):
    nodeName: str | None = None  # noqa: N815
    containers: list[_ContainerSpec] | None = None


class _StateDetail(msgspec.Struct):
    reason: str | None = None
    message: str | None = None
    startedAt: str | None = None  # noqa: N815


class _State(msgspec.Struct):
    waiting: _StateDetail | None = None
    running: _StateDetail | None = None
    terminated: _StateDetail | None = None


class _ContainerStatus(msgspec.Struct):
    name: str
    ready: bool = False
    restartCount: int = 0  # noqa: N815
    state: _State | None = None


class _PodStatus(msgspec.Struct):
    phase: str | None = None
    reason: str | None = None
    message: str | None = None
    containerStatuses: list[_ContainerStatus] | None = None  # noqa: N815


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec
    status: _PodStatus | None = None


class _ListMetadata(msgspec.Struct):
    next: str | None = msgspec.field(default=None, name="continue")


class _Page(msgspec.Struct):
    items: list[_Pod]
    metadata: _ListMetadata


_Decoded = TypeVar("_Decoded")


def _path(namespace: str, name: str = "") -> str:
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"/api/v1{inside}/pods" + (f"/{quote(name, safe='')}" if name else "")


def _decoded(body: Iterator[bytes], type_: type[_Decoded]) -> _Decoded:
    text = bytearray()
    for piece in body:
        text += piece
        if len(text) > _MAX_PAGE:
            raise Failure(f"the API server sent pods of more than {_MAX_PAGE} bytes")
    try:
        return msgspec.json.decode(text, type=type_)
    except (ValueError, RecursionError) as error:
        raise Failure(f"the API server sent no pods: {error}") from None


def _pod(pod: _Pod) -> Pod:
    meta, spec, status = pod.metadata, pod.spec, pod.status or _PodStatus()
    statuses = {it.name: it for it in status.containerStatuses or ()}
    return Pod(
        namespace=meta.namespace,
        name=meta.name,
        node=spec.nodeName or "",
        labels=meta.labels or {},
        default_container=(meta.annotations or {}).get("kubectl.kubernetes.io/default-container", ""),
        phase=status.phase or "Unknown",
        reason=": ".join(filter(None, (status.reason, status.message))),
        deleting=meta.deletionTimestamp is not None,
        containers=tuple(_container(it, statuses.get(it.name)) for it in spec.containers or ()),
    )


def _container(spec: _ContainerSpec, status: _ContainerStatus | None) -> PodContainer:
    command = (*(spec.command or ()), *(spec.args or ()))
    if status is None:
        return PodContainer(spec.name, spec.image, command)
    state = status.state or _State()
    stopped = state.waiting or state.terminated
    return PodContainer(
        name=spec.name,
        image=spec.image,
        command=command,
        ready=status.ready,
        restarts=status.restartCount,
        running_since=_seconds(state.running.startedAt) if state.running else None,
        problem=": ".join(filter(None, (stopped.reason, stopped.message))) if stopped else "",
    )


def _seconds(time_: str | None) -> float | None:
    """Return an RFC 3339 time in seconds since 1970, None if it is missing or malformed."""
    try:
        return datetime.fromisoformat(time_).timestamp() if time_ else None
    except ValueError:
        return None
