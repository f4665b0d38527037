"""HTTP: TLS, malformed requests, paths that need no token."""

import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import urllib3

from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.cluster import certificate
from tests.unit.lab.apiserver.conftest import Client, Maker


def raw(server: ApiServer, data: Any) -> Any:
    """All the server sends for some bytes, after which nothing more comes."""
    with socket.create_connection((server.address, server.port), timeout=5) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").read().decode()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET /x HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
    ],
)
def test_malformed_requests_are_refused(server: ApiServer, request_: Any, code: int) -> None:
    """The request is refused and the connection closed."""
    answer = raw(server, request_)
    assert answer.startswith(f"HTTP/1.1 {code} ")
    assert "\r\nConnection: close\r\n" in answer


def test_two_requests_on_one_connection(server: ApiServer) -> None:
    """Keep-alive, also for requests sent ahead."""
    request = b"GET /%s HTTP/1.1\r\nHost: x\r\n%s\r\n"
    answer = raw(server, request % (b"healthz", b"") + request % (b"version", b"Connection: close\r\n"))
    assert answer.count("HTTP/1.1 200 OK") == 2
    assert "v1.36" in answer


def test_a_chunked_body(server: ApiServer) -> None:
    """Clients may send a body without its length."""
    body = b'{"metadata":{"name":"n"}}'
    head = b"POST /api/v1/nodes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw(server, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert answer.startswith("HTTP/1.1 201 Created")


def test_expect_continue(server: ApiServer, client: Client, node: Maker) -> None:
    """A client that waits for 100 Continue gets it."""
    body = b'{"metadata":{"name":"n"}}'
    head = (
        b"POST /api/v1/nodes HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    answer = raw(server, head + body)
    assert answer.startswith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created")


def test_health_needs_no_token(server: ApiServer, client: Client) -> None:
    """Health and version are open to all, everything else is not."""
    server.token = "secret"
    codes = {path: client.ask("GET", path).status for path in ("/healthz", "/livez", "/readyz", "/version")}
    assert set(codes.values()) == {200}
    assert [client.ask("GET", path).status for path in ("/api", "/apis")] == [401, 401]


def test_discovery(server: ApiServer, client: Client) -> None:
    """Groups, versions and resources, as a client looks for them before anything else."""
    assert client.get("/api")["versions"] == ["v1"]
    assert "discovery.k8s.io" in [group["name"] for group in client.get("/apis")["groups"]]
    names = [entry["name"] for entry in client.get("/api/v1")["resources"]]
    assert {"services", "services/status", "nodes", "events"} <= set(names)
    for group in client.get("/apis")["groups"]:
        for entry in client.get(f"/apis/{group['preferredVersion']['groupVersion']}")["resources"]:
            assert client.get(f"/apis/{group['name']}/v1/{entry['name']}")["items"] == []


def test_tls(tmp_path: Path, client_of: Callable[[ApiServer], Client], service: Maker) -> None:
    """With a certificate it speaks TLS; watches and dropped connections work there as well."""
    made, key = certificate(tmp_path)
    with ApiServer(tls=(made, key)) as server:
        assert server.url.startswith("https://")
        assert str(made) in server.kubeconfig(tmp_path / "config").read_text()
        client = client_of(server)
        client.pool = urllib3.PoolManager(ssl_context=ssl.create_default_context(cafile=str(made)))
        events = client.watch("/api/v1/services?watch=1&timeoutSeconds=60")
        server.store.create(service("a"))
        assert next(events)["object"]["metadata"]["name"] == "a"
        server.drop_connections()
        with pytest.raises(urllib3.exceptions.ProtocolError):
            next(events)
        assert client.names("/api/v1/services") == ["a"]
