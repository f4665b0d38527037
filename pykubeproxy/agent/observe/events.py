"""Events on Nodes and Services, for people who look at these rather than at the log of a proxy."""

import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

import msgspec
import structlog
import urllib3

from pykubeproxy.objects import Family, Key
from pykubeproxy.sources.client import Client, TokenBucket
from pykubeproxy.sources.failures import Failure

NORMAL, WARNING = "Normal", "Warning"
# What other programs know the proxy of a node by.
_CONTROLLER = "kube-proxy"
# The API server refuses longer ones: characters of a note, and of a name less the part that tells events apart.
_LONGEST_NOTE, _LONGEST_NAME = 1024, 230
_LONGEST_INSTANCE = 128
# Beyond that many waiting events new ones are dropped; they are sent at this rate, in events a second, after a burst.
_MOST_WAITING = 100
_RATE, _BURST = 1.0, 10
# Pauses before another try, in seconds, and how long the server may take.
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
_TIMEOUT = 5.0
# What is read at most of one Service, in bytes.
_LONGEST_ANSWER = 4 << 20

log = structlog.get_logger()


class Event(msgspec.Struct, frozen=True):
    """Something that people should know about an object: `kind` and `about`, whose namespace is empty for a Node.

    `reason` and `action` are words in CamelCase, `note` a sentence.
    """

    kind: str
    about: Key
    type: str
    reason: str
    action: str
    note: str


class Recorder(Protocol):
    """Where events go. Recording one never waits and never fails."""

    def record(self, event: Event) -> None:
        """Tell of an event, if that can be done."""

    def close(self, seconds: float) -> None:
        """Give what is still waiting that much time to be sent; then nothing more is."""


class NoRecorder:
    """For an agent without an API server."""

    def record(self, event: Event) -> None:
        """Tell nobody."""

    def close(self, seconds: float) -> None:
        """There is nothing to wait for."""


class ApiRecorder:
    """Creates the events on the API server, from a thread of its own.

    An event that cannot be created after a few tries is dropped with a line in the log.
    """

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
        self._pace = TokenBucket(_RATE, _BURST)
        self._waiting: queue.Queue[tuple[int, Event] | None] = queue.Queue(_MOST_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def record(self, event: Event) -> None:
        """Queue an event; if too many are waiting it is dropped."""
        try:
            self._waiting.put_nowait((self._clock(), event))
        except queue.Full:
            log.warning("an event is dropped: too many are waiting", what=event.reason, note=event.note)

    def close(self, seconds: float) -> None:
        """Give what is still waiting that much time to be sent; then nothing more is."""
        deadline = time.monotonic() + seconds
        try:
            self._waiting.put(None, timeout=seconds)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        self._closing.set()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None and not self._closing.is_set():
            self._pace.wait()
            self._create(*item)

    def _create(self, ns: int, event: Event) -> None:
        """Create one event, in as many tries as there are."""
        path = f"/apis/events.k8s.io/v1/namespaces/{event.about.namespace or 'default'}/events"
        body = as_object(event, ns, self._instance, self._uid(event))
        for pause in (*self._pauses, None):
            try:
                self._client.post(path, body, asked="events", idle=_TIMEOUT)
                return
            except Failure as failure:
                if pause is None or failure.doubtful:
                    log.warning(
                        "an event could not be created",
                        what=event.reason,
                        note=event.note,
                        reason=str(failure),
                    )
                    return
                if self._closing.wait(max(pause, failure.retry_after)):
                    return

    def _uid(self, event: Event) -> str:
        """The UID of the Service that an event is about, without which `kubectl describe` does not show it; "" if unknown.

        Asked for here, as events are rare and the agent keeps no UIDs; a proxy may list Services, but not get one.
        """
        if event.kind != "Service":
            return ""
        path = f"/api/v1/namespaces/{event.about.namespace}/services"
        query = {"fieldSelector": f"metadata.name={event.about.name}"}
        try:
            answer = self._client.get(path, query, asked="services", idle=_TIMEOUT)
            try:
                body = answer.read(_LONGEST_ANSWER, decode_content=False)
            finally:
                answer.close()
                answer.release_conn()
            listed = msgspec.json.decode(body, type=_Listed)
        except (Failure, urllib3.exceptions.HTTPError, OSError, ValueError, RecursionError):
            return ""
        return next((it.metadata.uid for it in listed.items or ()), "")


class _Metadata(msgspec.Struct):
    uid: str = ""


class _Object(msgspec.Struct):
    metadata: _Metadata


class _Listed(msgspec.Struct):
    items: list[_Object] | None = None


def as_object(event: Event, ns: int, instance: str, uid: str = "") -> dict[str, object]:
    """The Event of events.k8s.io/v1 that says it, `ns` being the time in nanoseconds since 1970.

    `uid` is that of the Service it is about, if that is known.
    """
    about = event.about
    regarding = {"apiVersion": "v1", "kind": event.kind, "name": about.name}
    if about.namespace:
        regarding["namespace"] = about.namespace
        if uid:
            regarding["uid"] = uid
    else:
        # kubectl and the kubelet go by this for nodes, whose events come before anybody knows their UID.
        regarding["uid"] = about.name
    moment = datetime.fromtimestamp(ns // 1000 / 1e6, UTC)
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{about.name[:_LONGEST_NAME].rstrip('.-')}.{ns:x}",
            "namespace": about.namespace or "default",
        },
        "eventTime": moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": _CONTROLLER,
        "reportingInstance": instance,
        "action": event.action,
        "reason": event.reason,
        "regarding": regarding,
        "type": event.type,
        "note": event.note[:_LONGEST_NOTE],
    }


def starting(node_name: str) -> Event:
    """The proxy of a node has started."""
    return _about_node(node_name, NORMAL, "Starting", "")


def health_server_failed(node_name: str, why: str) -> Event:
    """The address for /healthz cannot be listened on, for which the agent ends (bindAddressHardFail)."""
    return _about_node(node_name, WARNING, "FailedToStartProxierHealthcheck", why)


def metrics_server_failed(node_name: str, why: str) -> Event:
    """The address for /metrics cannot be listened on, for which the agent ends (bindAddressHardFail)."""
    return _about_node(node_name, WARNING, "FailedToStartMetricServer", why)


def port_taken(node_name: str, service: Key, port: int, why: str) -> Event:
    """A Service's health check port cannot be listened on."""
    note = f"node {node_name} cannot serve the health check of {service} on port {port}: {why}"
    return Event("Service", service, WARNING, "FailedToStartServiceHealthcheck", "Listen", note)


def set_aside(node_name: str, service: Key, why: str) -> Event:
    """A Service's rules are refused by iptables, and it is served no longer until it changes."""
    note = f"node {node_name} does not serve {service}, for iptables refuses its rules: {why}"
    return Event("Service", service, WARNING, "ServiceSetAside", "Sync", note)


def rules_repaired(node_name: str, family: Family, what: str, writers: tuple[str, ...]) -> Event:
    """Others had changed a node's rules, which are as they were."""
    by = f" by {', '.join(writers)}" if writers else ""
    note = f"the {family.value} rules of node {node_name} were changed{by} and have been repaired: {what}"
    return Event("Node", Key("", node_name), WARNING, "RulesRepaired", "Sync", note)


def _about_node(node_name: str, type_: str, reason: str, note: str) -> Event:
    return Event("Node", Key("", node_name), type_, reason, "StartKubeProxy", note)
