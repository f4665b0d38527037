"""Pods: one process in one namespace each, and the Pod objects and EndpointSlices that a cluster would have of them."""

import http.client
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import urllib3

from pykubeproxy import __version__
from pykubeproxy.lab.agents import KubeProxyBinary
from pykubeproxy.lab.api import POD_PORT, PODS, SLICES, Api, ApiFailure, Object, in_namespace
from pykubeproxy.lab.apiserver.kubelet import PUBLISHED, running
from pykubeproxy.lab.apiserver.store import now
from pykubeproxy.lab.network import Namespace, Site
from pykubeproxy.lab.prober import Prober, ProbeTarget

WORKLOADS = Path(__file__).with_name("workloads.py")
TIMEOUT = 120.0
_CHECK_SECONDS = 1.0  # between two looks at agents and Services, which others may end and change
_PROXY = "pykubeproxy"
_IMAGE = f"{_PROXY}:{__version__}"
MANAGER = "lab.pykubeproxy"
TRIGGER_TIME = "endpoints.kubernetes.io/last-change-trigger-time"


@dataclass(frozen=True)
class PodState:
    """The status of a pod; `answering` is its readiness probe's result, `gates` are the closed readiness gates."""

    running: bool = True
    answering: bool = False
    terminating: bool = False
    gates: frozenset[str] = frozenset()

    @property
    def ready(self) -> bool:
        """The pod condition Ready: the readiness probe succeeds and all gates are open."""
        return self.running and self.answering and not self.gates

    def __str__(self) -> str:
        if not self.running:
            return "ended"
        text = "ready" if self.ready else "not ready"
        if self.gates:
            text += f", waiting for {', '.join(sorted(self.gates))}"
        return f"{text}, terminating" if self.terminating else text


@dataclass(eq=False)
class LabPod:
    """A pod. Calls `changed`, from any thread, after each change of `status`."""

    name: str
    app: str
    site: Site
    addresses: tuple[str, str]
    namespace: Namespace
    interface: str
    log: Path
    changed: Callable[[], None]
    status: PodState
    started: str = field(default_factory=now)  # a time of the API

    def start(self, command: list[str]) -> None:
        """Start the process; each "ready" or "unready" on its standard output is a change of readiness."""
        self.prober = Prober(self.namespace)
        self._published = self.status  # the last status for which `changed` has returned
        self._condition = threading.Condition()
        with self.log.open("wb") as errors:
            self._process = self.namespace.spawn(command, output=subprocess.PIPE, errors=errors)
        self._reader = threading.Thread(target=self._read, name=f"pod {self.name}", daemon=True)
        self._reader.start()

    def target(self, family: int = 4) -> ProbeTarget:
        return ProbeTarget(self.addresses[family == 6], POD_PORT)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                word = line.decode().strip()
                if word in ("ready", "unready"):
                    self._update(answering=word == "ready")
        self._process.wait()
        self._update(running=False)

    def _update(self, **changes: bool | frozenset[str]) -> None:
        with self._condition:
            status = self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        self.changed()
        with self._condition:
            self._published = status
            self._condition.notify_all()

    def _await(self, condition: Callable[[PodState], bool], state: str) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: condition(self._published), TIMEOUT):
                raise TimeoutError(f"pod {self.name} is not {state} after {TIMEOUT:.0f} s; see {self.log}")

    def wait_answering(self) -> None:
        """Wait until the readiness probe succeeds; raises TimeoutError, also if the process ends."""
        self._await(lambda status: status.answering or not status.running, "answering")
        if not self._published.running:
            raise TimeoutError(f"pod {self.name} ended before it answered; see {self.log}")

    def set_answering(self, answering: bool) -> None:
        """Make the readiness probe succeed or fail; the pod answers in both cases."""
        with self.namespace.entered():
            connection = http.client.HTTPConnection("127.0.0.1", POD_PORT, timeout=5)
            connection.request("POST", "/ready" if answering else "/unready")
            connection.getresponse().read()
            connection.close()
        self._await(lambda status: status.answering == answering, "ready" if answering else "unready")

    def open_gate(self, gate: str) -> None:
        self._update(gates=self.status.gates - {gate})

    def mark_terminating(self) -> None:
        """Mark the pod as deleted, without a signal to its process."""
        self._update(terminating=True)

    def terminate(self) -> None:
        """Send SIGTERM; the process ends after its linger time."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait_ended(self) -> None:
        """Wait until the process has ended and `changed` has returned; raises TimeoutError."""
        self._reader.join(TIMEOUT)
        if self._reader.is_alive():
            raise TimeoutError(f"pod {self.name} has not ended after {TIMEOUT:.0f} s")


def workload(name: str, *options: str) -> list[str]:
    """Return the command of one of the programs in workloads.py."""
    # -I -S skip the environment and site-packages, which halves the start time.
    return [sys.executable, "-I", "-S", str(WORKLOADS), name, "--port", str(POD_PORT), *options]


class PublishedObject(NamedTuple):
    """An object of the lab: a Pod with its status, which may be being deleted, or an EndpointSlice."""

    body: Object
    terminating: bool = False

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def path(self) -> str:
        """The path of its list."""
        return in_namespace(PODS if self.is_pod else SLICES, self.body["metadata"]["namespace"])

    @property
    def node(self) -> str:
        """The node of a Pod."""
        return str(self.body["spec"]["nodeName"])

    @property
    def is_pod(self) -> bool:
        return bool(self.body["kind"] == "Pod")

    @property
    def is_proxy(self) -> bool:
        """Whether it is the Pod of a node's proxy."""
        return self.is_pod and bool(self.body["spec"].get("hostNetwork"))


class Publisher:
    """Writes objects that changed; on a thread of its own too, from construction to `stop`.

    Calls `deleted`, on that thread, with each Pod that a client has deleted. EndpointSlices that clients delete come back,
    and so do the Pods of proxies.
    """

    def __init__(
        self,
        api: Api,
        desired: Callable[[], Iterable[PublishedObject]],
        deleted: Callable[[PublishedObject], None] = lambda _: None,
    ) -> None:
        self._api = api
        self._desired = desired
        self._deleted = deleted
        self._lock = threading.Lock()
        self._written: dict[str, PublishedObject] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="publisher", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stopped.wait(_CHECK_SECONDS):
            # The server is down or injects a fault: retry.
            with suppress(ApiFailure, urllib3.exceptions.HTTPError, OSError, ValueError):
                deleted = self._take_deleted()
                self.publish()
                for pod in deleted:
                    self._deleted(pod)

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()

    def publish(self) -> bool:
        """Write what changed since the last call; return False after `stop`. Raises ApiFailure, HTTPError."""
        with self._lock:
            if self._stopped.is_set():
                return False
            desired = {f"{item.path}/{item.name}": item for item in self._desired()}
            for path in self._written.keys() - desired.keys():
                self._delete(path, 0)
                del self._written[path]
            for path, item in desired.items():
                before = self._written.get(path)
                if before is None or before.body != item.body:
                    self._write(path, item)
                if item.terminating and not (before and before.terminating):
                    self._delete(path, 30)
                self._written[path] = item
            return True

    def _take_deleted(self) -> list[PublishedObject]:
        """Return the Pods that clients have deleted. Objects that come back are forgotten, so that they are written."""
        with self._lock:
            present = {
                f"{in_namespace(path, item['metadata']['namespace'])}/{item['metadata']['name']}"
                for path in (PODS, SLICES)
                for item in self._api.items(path)
                if "deletionTimestamp" not in item["metadata"]
            }
            deleted = {
                path: item
                for path, item in self._written.items()
                if path not in present and not item.terminating
            }
            for path, item in deleted.items():
                if not item.is_pod or item.is_proxy:
                    self._delete(path, 0)
                    del self._written[path]
            return [item for item in deleted.values() if item.is_pod]

    def _write(self, path: str, item: PublishedObject) -> None:
        """Write an object, of a Pod its status; create the object unless a client has deleted that Pod."""
        body, path = item.body, f"{path}/status" if item.is_pod else path
        if not item.is_pod:
            changed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            body = body | {"metadata": body["metadata"] | {"annotations": {TRIGGER_TIME: changed}}}
        try:
            self._api.call("PUT", path, body)
        except ApiFailure as error:
            if error.status != 404:
                raise
            if item.is_pod and f"{item.path}/{item.name}" in self._written:
                return  # `_take_deleted` returns it
            self._api.call("POST", item.path, body)
            if item.is_pod:
                self._api.call("PUT", path, body)

    def _delete(self, path: str, grace: int) -> None:
        self._api.delete(f"{path}?gracePeriodSeconds={grace}")


def workload_pod(pod: LabPod) -> PublishedObject:
    """Return the object of a workload pod."""
    spec = {"nodeName": pod.site.name, "containers": [_container(pod.app, "lab")]}
    status = _status(spec, pod.site, pod.addresses, pod.started, pod.status.ready)
    status["conditions"] += [{"type": gate, "status": "False"} for gate in sorted(pod.status.gates)]
    if not pod.status.running:
        status["phase"] = "Succeeded"
    body = _pod(pod.name, "default", {"app": pod.app}, {}, spec, status)
    return PublishedObject(body, pod.status.terminating)


def proxy_pod(
    site: Site, started: str, alive: bool, kube_proxy: KubeProxyBinary | None = None
) -> PublishedObject:
    """Return the object of a node's proxy pod, as of manifests/base or of kubeadm: running, ready while the proxy is alive.

    So exec works in the pod of a proxy that was stopped, as in one that hangs.
    """
    spec: Object = {"nodeName": site.name, "hostNetwork": True}
    if kube_proxy:
        name = container = "kube-proxy"
        labels = {"k8s-app": name}
        command = [f"/usr/local/bin/{name}", f"--proxy-mode={kube_proxy.mode}"]
        image = f"registry.k8s.io/{name}:{kube_proxy.version}"
        spec["containers"] = [_container(container, image) | {"command": command}]
    else:
        name, container = _PROXY, "agent"
        labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "service-proxy"}
        spec["containers"] = [_container(container, _IMAGE)]
        spec["initContainers"] = [_container("set-up", _IMAGE)]
    annotations = {"kubectl.kubernetes.io/default-container": container}
    status = _status(spec, site, site.addresses, started, alive)
    pod = _pod(f"{name}-{site.name}", "kube-system", labels, annotations, spec, status)
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": name, "uid": name}
    pod["metadata"]["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
    return PublishedObject(pod)


def _container(name: str, image: str) -> Object:
    return {"name": name, "image": image}


def _pod(
    name: str,
    namespace: str,
    labels: dict[str, str],
    annotations: dict[str, str],
    spec: Object,
    status: Object,
) -> Object:
    meta = {"name": name, "namespace": namespace, "labels": labels}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**meta, "annotations": {**annotations, PUBLISHED: "true"}},
        "spec": spec,
        "status": status,
    }


def _status(spec: Object, site: Site, addresses: Iterable[str], started: str, ready: bool) -> Object:
    hosts = [{"ip": address} for address in site.addresses]
    return running(spec, list(addresses), started, ready) | {"hostIP": site.addresses[0], "hostIPs": hosts}


def slices(
    service: Object, pods: Iterable[LabPod], pod_labels: Mapping[str, Mapping[str, str]]
) -> list[Object]:
    """Return a Service's slices, one for each address family; [] without a selector: others write those.

    `pod_labels` are those of Pod objects by name, which clients may change.
    """
    spec, metadata = service["spec"], service["metadata"]
    selector = spec.get("selector")
    if not selector:
        return []
    selected = [
        pod
        for pod in pods
        if metadata["namespace"] == "default"  # as all pods
        and selector.items() <= pod_labels.get(pod.name, {"app": pod.app}).items()
        and pod.status.running
    ]
    publish = bool(spec.get("publishNotReadyAddresses"))
    labels = {
        "kubernetes.io/service-name": metadata["name"],
        "endpointslice.kubernetes.io/managed-by": MANAGER,
    }
    return [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "namespace": metadata["namespace"],
                "name": f"{metadata['name']}-{family.lower()}",
                "labels": labels,
            },
            "addressType": family,
            "ports": [_port(port) for port in spec.get("ports") or []],
            "endpoints": [_endpoint(pod, family, publish) for pod in selected],
        }
        for family in spec.get("ipFamilies") or ["IPv4"]
    ]


def _port(port: Object) -> Object:
    number = port["targetPort"] if isinstance(port.get("targetPort"), int) else port["port"]
    return {"name": port.get("name", ""), "protocol": port["protocol"], "port": number}


def _endpoint(pod: LabPod, family: str, publish: bool) -> Object:
    return {
        "addresses": [pod.addresses[family == "IPv6"]],
        "conditions": {
            "ready": publish or (pod.status.ready and not pod.status.terminating),
            "serving": pod.status.ready,
            "terminating": pod.status.terminating,
        },
        "nodeName": pod.site.name,
        "zone": pod.site.zone,
        "targetRef": {"kind": "Pod", "namespace": "default", "name": pod.name},
    }
