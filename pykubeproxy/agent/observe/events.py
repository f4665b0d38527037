"""Kubernetes Events on Nodes and Services, sent to the API server."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec
import structlog

from pykubeproxy.objects import Family, Key
from pykubeproxy.sources.client import Client, TokenBucket
from pykubeproxy.sources.failures import Failure

_WARNING = "Warning"
_CONTROLLER = "kube-proxy"
# Limits of the API server, in characters; the name leaves room for a unique suffix.
_LONGEST_NOTE, _LONGEST_NAME, _LONGEST_INSTANCE = 1024, 230, 128
# Further events are dropped while this many are queued. Rate in events per second.
_LONGEST_QUEUE = 100
_RATE, _BURST = 1.0, 10
# Seconds before each retry, and per request.
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
_TIMEOUT = 5.0
# The maximum to read of a list of one Service, in pieces of up to 64 KiB.
_MOST_PIECES = 64
_BIND_FAILED = {"health": "FailedToStartProxierHealthcheck", "metrics": "FailedToStartMetricServer"}

log = structlog.get_logger()


class KubernetesEvent(msgspec.Struct, frozen=True):
    """An event about the object `regarding` of this kind, whose namespace is empty for a Node.

    `reason` and `action` are in CamelCase, `note` is a sentence.
    """

    kind: str
    regarding: Key
    type: str
    reason: str
    action: str
    note: str


class Recorder:
    """Drop events, for an agent without an API server. Any thread may call a recorder; it never raises."""

    def record(self, event: KubernetesEvent) -> None:
        """Queue an event without blocking; it may be dropped."""

    def close(self, seconds: float) -> None:
        """Wait up to this time for queued events to be sent, then drop the rest."""


class ApiRecorder(Recorder):
    """Create events on the API server, from a separate thread; log those that fail."""

    def __init__(
        self,
        client: Client,
        node_name: str,
        pauses: tuple[float, ...] = _PAUSES,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client = client
        self._instance = f"{_CONTROLLER}-{node_name}"[:_LONGEST_INSTANCE]
        self._pauses = pauses
        self._clock = clock
        self._limiter = TokenBucket(_RATE, _BURST)
        self._queue: queue.Queue[tuple[int, KubernetesEvent] | None] = queue.Queue(_LONGEST_QUEUE)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def record(self, event: KubernetesEvent) -> None:
        try:
            self._queue.put_nowait((self._clock(), event))
        except queue.Full:
            log.warning("event dropped, queue full", reason=event.reason, note=event.note)

    def close(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._closing.set()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None and not self._closing.is_set():
            self._limiter.wait()
            self._create(*item)

    def _create(self, ns: int, event: KubernetesEvent) -> None:
        path = f"/apis/events.k8s.io/v1/namespaces/{event.regarding.namespace or 'default'}/events"
        body = as_object(event, ns, self._instance, self._uid(event))
        for pause in (*self._pauses, None):
            try:
                self._client.post(path, body, resource="events", idle=_TIMEOUT)
                return
            except Failure as failure:
                if pause is None or failure.persistent:
                    log.warning("event not sent", reason=event.reason, note=event.note, error=str(failure))
                    return
                if self._closing.wait(max(pause, failure.retry_after)):
                    return

    def _uid(self, event: KubernetesEvent) -> str:
        """Return the UID of the Service that an event is about, "" if unknown; `kubectl describe` selects by it.

        The agent keeps no UIDs. A proxy's role may list Services, but not get one.
        """
        if event.kind != "Service":
            return ""
        path = f"/api/v1/namespaces/{event.regarding.namespace}/services"
        query = {"fieldSelector": f"metadata.name={event.regarding.name}"}
        try:
            with self._client.stream(path, query, resource="services", idle=_TIMEOUT) as pieces:
                body = b"".join(itertools.islice(pieces, _MOST_PIECES))
            return str(msgspec.json.decode(body)["items"][0]["metadata"]["uid"])
        except (Failure, ValueError, LookupError, TypeError, RecursionError):
            return ""


def as_object(event: KubernetesEvent, ns: int, instance: str, uid: str = "") -> dict[str, object]:
    """Return the Event object of events.k8s.io/v1; `ns` is its time in ns since 1970, `uid` that of its Service."""
    about = event.regarding
    # kubectl and the kubelet use a node's name as its UID in events.
    regarding = {"namespace": about.namespace, "uid": uid} if about.namespace else {"uid": about.name}
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{about.name[:_LONGEST_NAME].rstrip('.-')}.{ns:x}",
            "namespace": about.namespace or "default",
        },
        "eventTime": datetime.fromtimestamp(ns // 1000 / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": _CONTROLLER,
        "reportingInstance": instance,
        "action": event.action,
        "reason": event.reason,
        "regarding": {
            "apiVersion": "v1",
            "kind": event.kind,
            "name": about.name,
            **{field: value for field, value in regarding.items() if value},
        },
        "type": event.type,
        "note": event.note[:_LONGEST_NOTE],
    }


def starting(node_name: str) -> KubernetesEvent:
    """Return the event that the proxy of a node started."""
    return _on_node(node_name, "Normal", "Starting", "StartKubeProxy", "")


def bind_failed(node_name: str, server: str, note: str) -> KubernetesEvent:
    """Return the event that the "health" or "metrics" `server` cannot bind its address, so the agent ends."""
    return _on_node(node_name, _WARNING, _BIND_FAILED[server], "StartKubeProxy", note)


def port_taken(node_name: str, service: Key, port: int, reason: str) -> KubernetesEvent:
    """Return the event that the agent cannot bind a Service's health check port."""
    note = f"node {node_name} cannot serve the health check of {service} on port {port}: {reason}"
    return KubernetesEvent("Service", service, _WARNING, "FailedToStartServiceHealthcheck", "Listen", note)


def service_quarantined(node_name: str, service: Key, reason: str) -> KubernetesEvent:
    """Return the event that this node does not serve a Service or one of its ports."""
    note = f"node {node_name} does not serve {service}: {reason}"
    return KubernetesEvent("Service", service, _WARNING, "ServiceQuarantined", "Sync", note)


def address_skipped(node_name: str, service: Key, addresses: Sequence[str]) -> KubernetesEvent:
    """Return the event that this node does not serve these addresses and ports of a Service."""
    note = (
        f"node {node_name} does not serve {service} at {', '.join(addresses)}:"
        " this node reaches the API server at the same address and port"
    )
    return KubernetesEvent("Service", service, _WARNING, "AddressSkipped", "Sync", note)


def affinity_not_kept(node_name: str, service: Key, lists: int, limit: int) -> KubernetesEvent:
    """Return the event that a Service is served without session affinity, because of maxAffinityLists."""
    note = (
        f"node {node_name} serves {service} without session affinity, which needs {lists} lists of clients: the Services of"
        f" a namespace may have {limit}, the oldest Service first (maxAffinityLists)"
    )
    return KubernetesEvent("Service", service, _WARNING, "AffinityNotKept", "Sync", note)


def drift_repaired(
    node_name: str, family: Family, tables: Mapping[str, str], writers: tuple[str, ...]
) -> KubernetesEvent:
    """Return the event that the agent repaired drift; `tables` maps each table to its drift."""
    drift = "; ".join(f"{table}: {text}" for table, text in tables.items())
    who = ", ".join(writers) or "another program"
    note = f"{who} changed {family.value} rules of node {node_name}; pykubeproxy repaired them: {drift}"
    return _on_node(node_name, _WARNING, "DriftRepaired", "Sync", note)


def drift_contested(node_name: str, family: Family) -> KubernetesEvent:
    """Return the event that another program undoes each repair."""
    note = f"another program keeps undoing {family.value} rules of node {node_name}; pykubeproxy waits longer before each repair"
    return _on_node(node_name, _WARNING, "DriftContested", "Sync", note)


def drift_calm(node_name: str, family: Family) -> KubernetesEvent:
    """Return the event that no other program undoes repairs any more."""
    note = f"no other program undoes {family.value} rules of node {node_name} any more"
    return _on_node(node_name, "Normal", "DriftCalm", "Sync", note)


def _on_node(node_name: str, type_: str, reason: str, action: str, note: str) -> KubernetesEvent:
    return KubernetesEvent("Node", Key("", node_name), type_, reason, action, note)
