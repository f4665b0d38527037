"""TLS, and paths that need no token."""

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import urllib3

from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.cluster import certificate
from tests.unit.lab.apiserver.conftest import Client, Maker


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
    for group in [group for group in client.get("/apis")["groups"] if group["name"] != "apps"]:
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
