"""Kubernetes Events on Nodes and Services, sent to the API server."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
import structlog

from pykubeproxy.objects import Key, Kind
from pykubeproxy.report_limit import ReportLimit
from pykubeproxy.sources.client import Client, TokenBucket
from pykubeproxy.sources.failures import Failure, Unauthorized

WARNING, NORMAL = "Warning", "Normal"
_CONTROLLER = "kube-proxy"
# Limits of the API server, in characters; the name leaves room for a unique suffix.
_LONGEST_NOTE, _LONGEST_NAME = 1024, 230
# Further events of a namespace are dropped while this many wait. Rate in events per second.
_MOST_WAITING = 100
_RATE, _BURST = 1.0, 10
# Events in each period of this many seconds: for each object and reason, and for each namespace of Services.
_PERIOD, _PER_OBJECT, _PER_NAMESPACE = 600.0, 3, 10
# Seconds before each retry, and per request.
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
_TIMEOUT = 5.0

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
    """Drop events, for an agent without an API server. Any thread may call a recorder; it never raises.

    `uid_of` returns the UID of a Service, "" if unknown; `kubectl describe` selects events by it.
    """

    uid_of: Callable[[Key], str] = staticmethod(lambda _: "")

    def __init__(self, node_name: str) -> None:
        self.node_name = node_name

    def on_node(self, reason: str, note: str = "", action: str = "Sync", type_: str = WARNING) -> None:
        """Record an event on this node."""
        self.record(KubernetesEvent("Node", Key("", self.node_name), type_, reason, action, note))

    def on_service(self, service: Key, reason: str, what: str, action: str = "Sync") -> None:
        """Record a warning about a Service: what this node does with it, and why."""
        note = f"node {self.node_name} {what}"
        self.record(KubernetesEvent("Service", service, WARNING, reason, action, note))

    def record(self, event: KubernetesEvent) -> None:
        """Queue an event without blocking; it may be dropped."""

    def close(self, seconds: float) -> None:
        """Wait up to this time for queued events to be sent, then drop the rest."""


class _Recorded(msgspec.Struct, frozen=True):
    """An event, when it was recorded in ns since 1970, and how many times since it was last sent."""

    ns: int
    event: KubernetesEvent
    uid: str
    times: int = 1


class _NamespaceEvents(msgspec.Struct):
    """The events of a namespace that wait to be sent, and those that wait for the next period."""

    queued: deque[_Recorded] = msgspec.field(default_factory=deque)
    held: dict[tuple[Key, str], _Recorded] = {}


class ApiRecorder(Recorder):
    """Create events on the API server, from a separate thread; log those that fail.

    Beyond a limit for each object and each namespace, only the last event of each object and reason is sent, once the
    period is over, with the number of events. Namespaces take turns.
    """

    def __init__(
        self,
        client: Client,
        node_name: str,
        pauses: tuple[float, ...] = _PAUSES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(node_name)
        self._client = client
        self._instance = f"{_CONTROLLER}-{socket.gethostname()}"
        self._pauses = pauses
        self._monotonic = monotonic
        self._limiter = TokenBucket(_RATE, _BURST)
        self._limit = ReportLimit(_PERIOD, _PER_OBJECT, _PER_NAMESPACE)
        self._changed = threading.Condition()
        self._namespaces: dict[str, _NamespaceEvents] = {}
        self._draining = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def record(self, event: KubernetesEvent) -> None:
        recorded = _Recorded(
            time.time_ns(), event, self.uid_of(event.regarding) if event.kind == "Service" else ""
        )
        with self._changed:
            self._release()
            added = self._add(recorded)
            self._changed.notify()
        if not added:
            log.warning("event dropped", about=event.regarding, reason=event.reason, note=event.note)

    def close(self, seconds: float) -> None:
        with self._changed:
            self._draining = True
            self._changed.notify()
        self._thread.join(seconds)
        self._closing.set()

    def _add(self, recorded: _Recorded) -> bool:
        """Queue or hold an event. Return whether there was room."""
        event = recorded.event
        about, key = event.regarding, (event.regarding, event.reason)
        waiting = self._namespaces.setdefault(about.namespace, _NamespaceEvents())
        if before := waiting.held.get(key):
            waiting.held[key] = msgspec.structs.replace(recorded, times=before.times + recorded.times)
        elif len(waiting.queued) < _MOST_WAITING and self._limit.admits(
            event.reason, about, self._monotonic()
        ):
            waiting.queued.append(recorded)
        elif len(waiting.held) < _MOST_WAITING:
            waiting.held[key] = recorded
        else:
            return False
        return True

    def _run(self) -> None:
        while (recorded := self._next()) and not self._closing.is_set():
            self._limiter.wait()
            self._create(recorded)

    def _next(self) -> _Recorded | None:
        """Wait for the next event to send. Return None once the recorder closes and all queued events were sent."""
        with self._changed:
            while True:
                self._release()
                for name, waiting in tuple(self._namespaces.items()):
                    if waiting.queued or not waiting.held:
                        del self._namespaces[name]
                    if waiting.queued:
                        recorded = waiting.queued.popleft()
                        self._namespaces[name] = waiting  # behind the others
                        return recorded
                if self._draining:
                    return None
                self._changed.wait(
                    max(0.0, self._limit.ends - self._monotonic()) if self._namespaces else None
                )

    def _release(self) -> None:
        """In a new period, queue the events that waited for it, as far as its limit allows."""
        if self._monotonic() < self._limit.ends:
            return
        for waiting in self._namespaces.values():
            held, waiting.held = waiting.held, {}
            for recorded in held.values():
                self._add(recorded)

    def _create(self, recorded: _Recorded) -> None:
        event = recorded.event
        path = f"/apis/events.k8s.io/v1/namespaces/{event.regarding.namespace or 'default'}/events"
        body = as_object(event, recorded.ns, self._instance, recorded.uid, recorded.times)
        fields = {"about": event.regarding, "reason": event.reason, "note": event.note}
        for pause in (*self._pauses, None):
            try:
                self._client.post(path, body, resource="events", idle=_TIMEOUT)
                return
            except Failure as failure:
                # A full quota or the end of a namespace must not delay the events of others.
                rejected = failure.refused and not (failure.server_wide or isinstance(failure, Unauthorized))
                if pause is None or failure.persistent or rejected:
                    log.warning("event not sent", **fields, error=str(failure))
                    return
                if self._closing.wait(max(pause, failure.retry_after)):
                    return


def as_object(
    event: KubernetesEvent, ns: int, instance: str, uid: str = "", times: int = 1
) -> dict[str, object]:
    """Return the Event object of events.k8s.io/v1; `ns` is its time in ns since 1970, `uid` that of its Service.

    `times` is the number of events for which it stands.
    """
    about, ending = event.regarding, f" ({times} times since the last such event)" if times > 1 else ""
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
            "apiVersion": Kind(event.kind).api_version,
            "kind": event.kind,
            "name": about.name,
            **{field: value for field, value in regarding.items() if value},
        },
        "type": event.type,
        "note": event.note[: _LONGEST_NOTE - len(ending)] + ending,
    }
