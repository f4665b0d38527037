"""EndpointSlices kept from the lab's pods, as the EndpointSlice controller of a cluster does."""

import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import urllib3

from pykubeproxy.lab.api import SERVICES, SLICES, Api, ApiError, Object, in_namespace
from pykubeproxy.lab.pods import Pod

SLICE_KIND = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
MANAGER = "lab.pykubeproxy"
TRIGGER_TIME = "endpoints.kubernetes.io/last-change-trigger-time"


class SliceController:
    """Brings the EndpointSlices at the API server in line with Services and pods.

    `reconcile` returns when the server has them. It is called by whoever changed a pod or a Service of
    the lab; a thread calls it for Services that others change.
    """

    def __init__(self, api: Api, pods: Callable[[], Iterable[Pod]]) -> None:
        self._api = api
        self._pods = pods
        self._lock = threading.Lock()
        self._written: dict[tuple[str, str], Object] = {}
        self._stopped = threading.Event()

    def follow(self) -> None:
        """Follow the Services that others make or change, until stopped; for a thread of its own."""
        while not self._stopped.wait(0.5):
            try:
                for event in self._api.watch(SERVICES):
                    # Without a selector a Service's slices are the business of whoever made it.
                    if event["object"].get("spec", {}).get("selector"):
                        self.reconcile()
            except (ApiError, urllib3.exceptions.HTTPError, OSError, ValueError):
                pass  # the server is away, or does wrong because somebody wanted it to; ask again

    def stop(self) -> None:
        """Write nothing any more."""
        with self._lock:
            self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether the lab is coming to its end."""
        return self._stopped.is_set()

    def reconcile(self) -> None:
        """Write the slices that differ from what was written last and delete those no longer wanted."""
        with self._lock:
            if self._stopped.is_set():
                return
            wanted = {
                (slice_["metadata"]["namespace"], slice_["metadata"]["name"]): slice_
                for service in self._api.items(SERVICES)
                for slice_ in slices(service, self._pods())
            }
            for key in self._written.keys() - wanted.keys():
                self._api.delete(f"{in_namespace(SLICES, key[0])}/{key[1]}")
                del self._written[key]
            for key, slice_ in wanted.items():
                if self._written.get(key) != slice_:
                    self._api.put(in_namespace(SLICES, key[0]), key[1], _stamped(slice_))
                    self._written[key] = slice_


def _stamped(slice_: Object) -> Object:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {**slice_, "metadata": {**slice_["metadata"], "annotations": {TRIGGER_TIME: now}}}


def slices(service: Object, pods: Iterable[Pod]) -> list[Object]:
    """The slices of a Service, one for each of its address families; none without a selector."""
    spec, metadata = service["spec"], service["metadata"]
    selector = spec.get("selector")
    if not selector:
        return []
    chosen = [pod for pod in pods if selector == {"app": pod.identity.app} and pod.status.running]
    publish = bool(spec.get("publishNotReadyAddresses"))
    labels = {
        "kubernetes.io/service-name": metadata["name"],
        "endpointslice.kubernetes.io/managed-by": MANAGER,
    }
    if spec.get("clusterIP") == "None":
        labels["service.kubernetes.io/headless"] = ""
    return [
        {
            **SLICE_KIND,
            "metadata": {
                "namespace": metadata["namespace"],
                "name": f"{metadata['name']}-{family.lower()}",
                "labels": labels,
            },
            "addressType": family,
            "ports": [_port(port) for port in spec.get("ports") or []],
            "endpoints": [_endpoint(pod, family, publish) for pod in chosen],
        }
        for family in spec.get("ipFamilies") or ["IPv4"]
    ]


def _port(port: Object) -> Object:
    target = port.get("targetPort")
    return {
        "name": port.get("name", ""),
        "protocol": port.get("protocol", "TCP"),
        "port": target if isinstance(target, int) else port["port"],
    }


def _endpoint(pod: Pod, family: str, publish: bool) -> Object:
    identity, status = pod.identity, pod.status
    return {
        "addresses": [identity.addresses[family == "IPv6"]],
        "conditions": {
            "ready": publish or (status.ready and not status.terminating),
            "serving": status.ready,
            "terminating": status.terminating,
        },
        "nodeName": identity.node,
        "zone": identity.zone,
        "targetRef": {"kind": "Pod", "namespace": "default", "name": identity.name},
    }
