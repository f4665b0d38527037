"""A small client of the lab's API server: plain JSON over HTTP, from inside a network namespace."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from pykubeproxy.lab.namespaces import entered

Object = dict[str, Any]

SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
NODES = "/api/v1/nodes"


class ApiError(RuntimeError):
    """The server refused; the text is its own message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Talks to the server at an address that only `namespace` can reach; any thread may use it."""

    def __init__(self, namespace: str, address: str, port: int) -> None:
        class Inside(HTTPConnection):
            def _new_conn(self) -> socket.socket:
                with entered(namespace):
                    return super()._new_conn()

        class Pool(HTTPConnectionPool):
            ConnectionCls = Inside

        self.url = f"http://{address}:{port}"
        self._pool = Pool(address, port, maxsize=4, timeout=urllib3.Timeout(5.0), retries=False)

    def call(self, method: str, path: str, body: Object | None = None) -> Object:
        """One request; PATCH means a merge patch. Raises ApiError for any answer that is not 2xx."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        response = self._pool.urlopen(
            method,
            path,
            body=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": kind, "Accept": "application/json"},
        )
        answer = json.loads(response.data or b"{}")
        if response.status >= 300:
            raise ApiError(response.status, f"{method} {path}: {answer.get('message', response.status)}")
        return dict(answer)

    def items(self, path: str) -> list[Object]:
        """All objects of a list."""
        return list(self.call("GET", path).get("items") or [])

    def put(self, path: str, name: str, body: Object) -> Object:
        """Create an object, or replace the one that is there."""
        try:
            return self.call("PUT", f"{path}/{name}", body)
        except ApiError as error:
            if error.status != 404:
                raise
        return self.call("POST", path, body)

    def delete(self, path: str) -> None:
        """Delete an object; one that is not there is fine."""
        try:
            self.call("DELETE", path)
        except ApiError as error:
            if error.status != 404:
                raise

    def watch(self, path: str, seconds: int = 3600) -> Iterator[Object]:
        """The events of a list, the present objects as ADDED first; ends when the server ends it. Raises ApiError."""
        response = self._pool.urlopen(
            "GET",
            f"{path}?watch=true&timeoutSeconds={seconds}",
            preload_content=False,
            timeout=urllib3.Timeout(connect=5.0, read=None),
        )
        if response.status >= 300:
            raise ApiError(response.status, f"GET {path}: {response.status}")
        pending = b""
        for chunk in response.stream(amt=None, decode_content=False):
            *lines, pending = (pending + chunk).split(b"\n")
            yield from (json.loads(line) for line in lines if line)


def in_namespace(path: str, namespace: str) -> str:
    """The path of the same list within a Kubernetes namespace."""
    base, _, resource = path.rpartition("/")
    return f"{base}/namespaces/{namespace}/{resource}"
