"""Certificates for TLS servers."""

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from pykubeproxy.lab.apiserver import ApiServer, Store
from pykubeproxy.objects import Kind
from pykubeproxy.sources import Client, Timing, Watch, api_watches
from tests.fakes.faulty_apiserver import FaultyApiServer

_REQUEST = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=server"
)


def certificate(folder: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and its key."""
    made, key = folder / "certificate.pem", folder / "key.pem"
    write_certificate(made, key)
    return made, key


def write_certificate(file: Path, key: Path, address: str = "127.0.0.1") -> None:
    """Write a self-signed certificate for an IP address to `file`, and its key to `key`."""
    options = ("-addext", f"subjectAltName=IP:{address}", "-keyout", str(key), "-out", str(file))
    subprocess.run([*shlex.split(_REQUEST), *options], check=True, capture_output=True)


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


class ConfigMapVolume:
    """A folder with config.conf, a symbolic link by way of the symbolic link ..data."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        self._version = 0
        self.path = folder / "config.conf"
        folder.mkdir()
        self.update(text)
        self.path.symlink_to("..data/config.conf")

    def update(self, text: str) -> None:
        """Write a new version, swap ..data and remove the old version."""
        self._version += 1
        version = self._folder / f"..{self._version}"
        version.mkdir()
        (version / "config.conf").write_text(text)
        (self._folder / "..data_tmp").symlink_to(version.name)
        (self._folder / "..data_tmp").rename(self._folder / "..data")
        shutil.rmtree(self._folder / f"..{self._version - 1}", ignore_errors=True)
