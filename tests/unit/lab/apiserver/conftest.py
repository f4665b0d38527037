"""A server, a plain HTTP client for it, and objects to put into it."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import urllib3

from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.waiting import PATIENCE

Json = dict[str, Any]
Maker = Callable[..., Json]


class Answer(NamedTuple):
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Json:
        return json.loads(self.text)


class Client:
    """Talks to a server; every call gives up after some seconds."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.pool = urllib3.PoolManager(timeout=PATIENCE, retries=False, cert_reqs="CERT_NONE")

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request. Headers are given with _ for -; a PATCH is a merge patch unless they say otherwise."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        response = self.pool.request(
            method, self.server.url + path, body=content, headers={"Content-Type": kind} | named
        )
        return Answer(response.status, response.headers, response.data.decode())

    def get(self, path: str) -> Json:
        """The body of a GET that must succeed."""
        answer = self.ask("GET", path)
        assert answer.status == 200, answer.text
        return answer.json

    def names(self, path: str) -> list[str]:
        """The names in a list."""
        return [item["metadata"]["name"] for item in self.get(path)["items"]]

    def watch(self, path: str) -> Iterator[Json]:
        """The events of a watch, one by one, until the server ends it."""
        response = self.pool.request("GET", self.server.url + path, preload_content=False)
        assert response.status == 200, response.data
        return (json.loads(line) for line in response)


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


@pytest.fixture
def client(server: ApiServer) -> Client:
    return Client(server)


@pytest.fixture
def client_of() -> Callable[[ApiServer], Client]:
    return Client


@pytest.fixture
def service() -> Callable[..., Json]:
    """Makes a Service with one port; keyword arguments go to its spec."""

    def make(
        name: str, namespace: str = "default", labels: dict[str, str] | None = None, **spec: Any
    ) -> Json:
        meta = {"name": name, "namespace": namespace} | ({"labels": labels} if labels else {})
        ports = [{"name": "http", "port": 80, "targetPort": 8080}]
        return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": ports} | spec}

    return make


@pytest.fixture
def endpoint_slice() -> Callable[..., Json]:
    """Makes an EndpointSlice with an endpoint for each address."""

    def make(name: str, *addresses: str, **more: Any) -> Json:
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": name,
                "namespace": "default",
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}} for address in addresses],
            "ports": [{"name": "http", "port": 8080}],
        } | more

    return make


@pytest.fixture
def node() -> Callable[..., Json]:
    def make(name: str, **more: Any) -> Json:
        return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}} | more

    return make


@pytest.fixture
def pod() -> Callable[..., Json]:
    """Makes a running Pod with one container on node n1; keyword arguments but status go to its spec."""

    def make(name: str, status: Json | None = None, **spec: Any) -> Json:
        meta = {"name": name, "namespace": "default"}
        containers = [{"name": "main", "image": "x"}]
        body = {"nodeName": "n1", "containers": containers} | spec
        running = {"phase": "Running"}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": meta,
            "spec": body,
            "status": status or running,
        }

    return make
