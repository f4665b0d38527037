"""The lab's pods as objects of its API server: the workload pods, and one proxy pod on each node."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import urllib3

from pykubeproxy import __version__
from pykubeproxy.lab.api import PODS, Api, ApiError, Object, in_namespace
from pykubeproxy.lab.apiserver.kubelet import PUBLISHED, running
from pykubeproxy.lab.network import Site
from pykubeproxy.lab.pods import Pod

_CHECK_SECONDS = 1.0  # between two looks at the agents, which may end unnoticed


class PublishedPod(NamedTuple):
    """A Pod object, and whether it is being deleted."""

    body: Object
    terminating: bool = False

    @property
    def path(self) -> str:
        """The path of its list."""
        return in_namespace(PODS, self.body["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])


class DaemonSet(NamedTuple):
    """What the pods of a proxy look like."""

    name: str
    labels: dict[str, str]
    containers: tuple[Object, ...]
    init_containers: tuple[Object, ...] = ()
    default_container: str = ""


def _container(name: str, image: str, *command: str) -> Object:
    return {"name": name, "image": image, **({"command": list(command)} if command else {})}


_IMAGE = f"pykubeproxy:{__version__}"
#: As in manifests/base.
PYKUBEPROXY = DaemonSet(
    "pykubeproxy",
    {"app.kubernetes.io/name": "pykubeproxy", "app.kubernetes.io/component": "service-proxy"},
    (_container("agent", _IMAGE),),
    (_container("set-up", _IMAGE),),
    "agent",
)
#: As kubeadm installs it.
KUBE_PROXY = DaemonSet(
    "kube-proxy",
    {"k8s-app": "kube-proxy"},
    (_container("kube-proxy", "kube-proxy:v1.36.0", "/usr/local/bin/kube-proxy"),),
)


class Publisher:
    """Writes Pod objects that changed; on a thread of its own too, from construction to `stop`.

    Objects that clients delete come back with the next change of their pod.
    """

    def __init__(self, api: Api, desired: Callable[[], Iterable[PublishedPod]]) -> None:
        self._api = api
        self._desired = desired
        self._lock = threading.Lock()
        self._written: dict[str, PublishedPod] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="publisher", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stopped.wait(_CHECK_SECONDS):
            # The server is down or injects a fault: retry.
            with suppress(ApiError, urllib3.exceptions.HTTPError, OSError, ValueError):
                self.publish()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()

    def publish(self) -> None:
        """Write what changed since the last call; nothing after `stop`. Raises ApiError, HTTPError."""
        with self._lock:
            if self._stopped.is_set():
                return
            desired = {f"{pod.path}/{pod.name}": pod for pod in self._desired()}
            for path in self._written.keys() - desired.keys():
                self._delete(path, 0)
                del self._written[path]
            for path, pod in desired.items():
                before = self._written.get(path)
                if before is None or before.body != pod.body:
                    self._write(path, pod)
                if pod.terminating and not (before and before.terminating):
                    self._delete(path, 30)
                self._written[path] = pod

    def _write(self, path: str, pod: PublishedPod) -> None:
        """Write a status; create the object if there is none."""
        try:
            self._api.call("PUT", f"{path}/status", pod.body)
        except ApiError as error:
            if error.status != 404:
                raise
            self._api.call("POST", pod.path, pod.body)
            self._api.call("PUT", f"{path}/status", pod.body)

    def _delete(self, path: str, grace: int) -> None:
        self._api.delete(f"{path}?gracePeriodSeconds={grace}")


def workload_pod(pod: Pod) -> PublishedPod:
    """Return the object of a workload pod."""
    spec = {"nodeName": pod.site.name, "containers": [_container(pod.app, "lab")]}
    status = _status(spec, pod.site, pod.addresses, pod.started, pod.status.ready)
    status["conditions"] += [{"type": gate, "status": "False"} for gate in sorted(pod.status.gates)]
    if not pod.status.running:
        status["phase"] = "Succeeded"
    body = _pod(pod.name, "default", {"app": pod.app}, {}, spec, status)
    return PublishedPod(body, pod.status.terminating)


def proxy_pod(site: Site, daemon_set: DaemonSet, started: str, alive: bool) -> PublishedPod:
    """Return the object of a node's proxy pod: running in any case, ready while the proxy's process is alive.

    So exec works in the pod of a proxy that was stopped, as in one that hangs.
    """
    spec = {
        "nodeName": site.name,
        "hostNetwork": True,
        "containers": list(daemon_set.containers),
        "initContainers": list(daemon_set.init_containers),
    }
    name = daemon_set.default_container
    annotations = {"kubectl.kubernetes.io/default-container": name} if name else {}
    status = _status(spec, site, site.addresses, started, alive)
    pod = _pod(f"{daemon_set.name}-{site.name}", "kube-system", daemon_set.labels, annotations, spec, status)
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": daemon_set.name, "uid": daemon_set.name}
    pod["metadata"]["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
    return PublishedPod(pod)


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
