"""A lab API server with named objects, and watches with short timeouts."""

from pathlib import Path
from typing import Any

import yaml

from pykubeproxy.lab.apiserver import ApiServer, Store
from pykubeproxy.objects import Kind
from pykubeproxy.sources import Client, Timing, Watch, api_watches
from tests.fakes.faulty_apiserver import FaultyApiServer

# Seconds between two bookmarks and between two reports of progress.
BOOKMARKS = 0.2
SHORT = Timing(answer=1.0, watch=(3600, 3600), steady=0.3, first_pause=0.05, longest_pause=0.3)


def service(name: str, **spec: Any) -> dict[str, Any]:
    """A Service, of type ClusterIP unless `spec` says otherwise."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"ports": [{"port": 80}], **spec},
    }


def slice_of(name: str, *addresses: str) -> dict[str, Any]:
    """An EndpointSlice of the service `name` with ready endpoints."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [it], "conditions": {"ready": True}} for it in addresses],
        "ports": [{"port": 8080}],
    }


def node(name: str, address: str) -> dict[str, Any]:
    """A Node with one internal address."""
    status = {"addresses": [{"type": "InternalIP", "address": address}]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}


def watches(url: str, kind: Kind | None = None, timing: Timing = SHORT) -> list[Watch]:
    """Return the watches of node n1, all or of one kind, without a rate limit."""
    all_of_them = api_watches(Client(master=url, qps=-1), "n1", timing)
    names = {
        Kind.SERVICE: "watch-services",
        Kind.ENDPOINT_SLICE: "watch-endpointslices",
        Kind.NODE: "watch-nodes",
    }
    return [it for it in all_of_them if kind is None or it.name == names[kind]]


def server(**options: Any) -> FaultyApiServer:
    """Return a server that is not running yet."""
    store = Store(progress_seconds=BOOKMARKS)
    return FaultyApiServer(**{"bookmark_seconds": BOOKMARKS, "store": store} | options)


def kubeconfig(
    api: ApiServer, path: Path, cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None
) -> Path:
    """Write the kubeconfig of a server with another cluster or user in it, and return its path."""
    content = yaml.safe_load(api.kubeconfig(path).read_text())
    if cluster is not None:
        content["clusters"][0]["cluster"] = cluster
    if user is not None:
        content["users"][0]["user"] = user
    path.write_text(yaml.safe_dump(content))
    return path


def unverified(api: ApiServer, path: Path) -> str:
    """Write a kubeconfig that disables the verification of a server, and return its path."""
    return str(kubeconfig(api, path, {"server": api.url, "insecure-skip-tls-verify": True}))
