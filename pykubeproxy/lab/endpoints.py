"""The EndpointSlices of the lab's pods, as a cluster's EndpointSlice controller writes them."""

import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import urllib3

from pykubeproxy.lab.api import SERVICES, SLICES, Api, ApiError, Object, in_namespace
from pykubeproxy.lab.pods import Pod

MANAGER = "lab.pykubeproxy"
TRIGGER_TIME = "endpoints.kubernetes.io/last-change-trigger-time"


class SliceController:
    """Reconciles EndpointSlices with Services and pods: Lab calls `reconcile` after its changes, a thread `follow`."""

    def __init__(self, api: Api, pods: Callable[[], Iterable[Pod]]) -> None:
        self._api = api
        self._pods = pods
        self._lock = threading.Lock()
        self._written: dict[tuple[str, str], Object] = {}
        self._stopped = threading.Event()

    def follow(self) -> None:
        """Watch Services and reconcile until stopped."""
        while not self._stopped.wait(0.5):
            try:
                for event in self._api.watch(SERVICES):
                    # Others maintain the slices of Services without a selector.
                    if event["object"].get("spec", {}).get("selector"):
                        self.reconcile()
            except (ApiError, urllib3.exceptions.HTTPError, OSError, ValueError):
                pass  # the server is down or injects a fault: retry

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()

    def reconcile(self) -> bool:
        """Write the slices that changed since the last call, and delete stale ones; return False after `stop`."""
        with self._lock:
            if self._stopped.is_set():
                return False
            desired = {
                (slice_["metadata"]["namespace"], slice_["metadata"]["name"]): slice_
                for service in self._api.items(SERVICES)
                for slice_ in slices(service, self._pods())
            }
            for key in self._written.keys() - desired.keys():
                self._api.delete(f"{in_namespace(SLICES, key[0])}/{key[1]}")
                del self._written[key]
            for key, slice_ in desired.items():
                if self._written.get(key) != slice_:
                    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                    stamped = {**slice_["metadata"], "annotations": {TRIGGER_TIME: now}}
                    self._api.put(in_namespace(SLICES, key[0]), key[1], {**slice_, "metadata": stamped})
                    self._written[key] = slice_
            return True


def slices(service: Object, pods: Iterable[Pod]) -> list[Object]:
    """Return a Service's slices, one for each address family; [] without a selector."""
    spec, metadata = service["spec"], service["metadata"]
    selector = spec.get("selector")
    if not selector:
        return []
    selected = [pod for pod in pods if selector == {"app": pod.app} and pod.status.running]
    publish = bool(spec.get("publishNotReadyAddresses"))
    labels = {
        "kubernetes.io/service-name": metadata["name"],
        "endpointslice.kubernetes.io/managed-by": MANAGER,
    }
    if spec.get("clusterIP") == "None":
        labels["service.kubernetes.io/headless"] = ""
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


def _endpoint(pod: Pod, family: str, publish: bool) -> Object:
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
