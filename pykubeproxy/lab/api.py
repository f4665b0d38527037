"""A client for the lab's API server, and the objects that the lab creates there."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import urllib3

from pykubeproxy.lab.network import Site, entered

Object = dict[str, Any]

SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"
NAMESPACES = "/api/v1/namespaces"
#: The port that every pod listens on.
POD_PORT = 8080


class ApiFailure(RuntimeError):
    """The API server returned an error; the text is its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """A thread-safe client for a server that is reachable from `namespace` only."""

    def __init__(self, namespace: str, address: str, port: int) -> None:
        self.url = f"http://{address}:{port}"
        self._namespace = namespace
        self._pool = urllib3.HTTPConnectionPool(
            address, port, maxsize=4, timeout=urllib3.Timeout(5.0), retries=False
        )

    def _request(self, method: str, path: str, **options: Any) -> urllib3.BaseHTTPResponse:
        with entered(self._namespace):
            return self._pool.urlopen(method, path, **options)

    def call(self, method: str, path: str, body: Object | None = None) -> Object:
        """Send one request; PATCH sends a merge patch. Raises ApiFailure for any status other than 2xx."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        response = self._request(
            method,
            path,
            body=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": kind, "Accept": "application/json"},
        )
        content = json.loads(response.data or b"{}")
        if response.status >= 300:
            raise ApiFailure(response.status, f"{method} {path}: {content.get('message', response.status)}")
        return dict(content)

    def items(self, path: str) -> list[Object]:
        return list(self.call("GET", path).get("items") or [])

    def put(self, path: str, name: str, body: Object) -> Object:
        """Create or replace an object."""
        try:
            return self.call("PUT", f"{path}/{name}", body)
        except ApiFailure as error:
            if error.status != 404:
                raise
        return self.call("POST", path, body)

    def delete(self, path: str) -> None:
        """Delete an object if it exists."""
        try:
            self.call("DELETE", path)
        except ApiFailure as error:
            if error.status != 404:
                raise


def in_namespace(path: str, namespace: str) -> str:
    """Return the path of a list within a Kubernetes namespace."""
    base, _, resource = path.rpartition("/")
    return f"{base}/namespaces/{namespace}/{resource}"


def service(name: str, port: int, protocols: Sequence[str], spec: Mapping[str, object]) -> Object:
    """Return a dual-stack Service for the pods of the app of its name; `spec` overrides fields."""
    ports: list[Object] = [
        {"protocol": protocol, "port": port, "targetPort": POD_PORT} for protocol in protocols
    ]
    if len(ports) > 1:
        ports = [{"name": one["protocol"].lower(), **one} for one in ports]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "selector": {"app": name},
            "ipFamilyPolicy": "RequireDualStack",
            "ipFamilies": ["IPv4", "IPv6"],
            "ports": ports,
            **spec,
        },
    }


def namespace(name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name},
        "status": {"phase": "Active"},
    }


def node(site: Site) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": site.name,
            "labels": {"kubernetes.io/hostname": site.name, "topology.kubernetes.io/zone": site.zone},
        },
        "spec": {"podCIDR": site.pod_cidrs[0], "podCIDRs": list(site.pod_cidrs)},
        "status": {
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
            "nodeInfo": {"kubeletVersion": "v1.36.0-lab"},
            "addresses": [
                *({"type": "InternalIP", "address": address} for address in site.addresses),
                {"type": "Hostname", "address": site.name},
            ],
        },
    }
