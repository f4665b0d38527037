"""Which requests share a connection, what opens a new one, and compressed responses."""

import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pykubeproxy.lab.apiserver import SERVICES
from pykubeproxy.objects import Deleted, Key, Kind
from pykubeproxy.sources import Client, SourceError, api_watches, credential_store, wire
from tests.fakes.canned import CannedServer, whole
from tests.fakes.cluster import SHORT, certificate, server, service, watches
from tests.fakes.follower import Follower
from tests.fakes.kubeconfigs import write_kubeconfig
from tests.fakes.relay import Relay
from tests.fakes.waiting import eventually


class Setting:
    """A client with a token file, a server behind a relay that counts connections, and their files."""

    def __init__(self, api: Any, relay: Relay, folder: Path) -> None:
        self.api, self.relay = api, relay
        self._folder, self.token, self.authority = folder, folder / "token", folder / "ca.pem"
        self.token.write_text("first")
        self.authority.write_text((folder / "certificate.pem").read_text())
        self.watch = api_watches(Client(self.configure(), qps=-1), "n1", SHORT)[0]

    def configure(self, **settings: str) -> str:
        """Write the kubeconfig with these settings of the cluster; return its path."""
        url, authority = f"https://127.0.0.1:{self.relay.port}", str(self.authority)
        cluster = {"server": url, "certificate-authority": authority, **settings}
        return write_kubeconfig(self._folder, cluster, {"tokenFile": str(self.token)})

    def connections(self, lists: int = 3) -> int:
        """List some times; return how many connections the server has seen so far."""
        for _ in range(lists):
            self.watch.once()
        return self.relay.accepted


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """Credentials count as old at once."""
    monkeypatch.setattr(credential_store, "_FRESH", 0.0)
    with (
        server(tls=certificate(tmp_path), token="first") as api,
        Relay(int(api.url.rpartition(":")[2])) as relay,
    ):
        yield Setting(api, relay, tmp_path)


def test_renewed_credentials_keep_the_connection(setting: Setting) -> None:
    """Also another token."""
    assert setting.connections() == 1
    setting.token.write_text("second")
    setting.api.token = "second"
    assert setting.connections() == 1


def test_another_authority_needs_a_new_connection(setting: Setting) -> None:
    """Also when its file changes in place."""
    assert setting.connections() == 1
    setting.authority.write_text(setting.authority.read_text() + "\n# renewed\n")
    assert setting.connections() == 2
    setting.authority.write_text("none")
    with pytest.raises(SourceError):
        setting.watch.once()


def test_another_server_name_needs_a_new_connection(setting: Setting) -> None:
    assert setting.connections() == 1
    setting.configure(**{"tls-server-name": "127.0.0.1"})
    assert setting.connections() == 2


def test_idle_connections_are_dropped_after_a_timeout(setting: Setting) -> None:
    """They may be as dead as the one that timed out."""
    assert setting.connections() == 1
    setting.relay.frozen.set()
    with pytest.raises(SourceError, match="no response"):
        setting.watch.once()
    setting.relay.frozen.clear()
    assert setting.connections() == 2


TOO_LARGE = "it has more than 16 MiB"
NAMES = [f"s{number:03}" for number in range(300)]


def long_service(name: str, length: int = 500) -> dict[str, Any]:
    """A Service with a long note."""
    made = service(name)
    made["metadata"]["annotations"] = {"note": "x" * length}
    return made


@pytest.mark.parametrize(("disabled", "encoding"), [(False, "gzip"), (True, "identity")])
def test_lists_are_compressed_and_watches_are_not(tmp_path: Path, disabled: bool, encoding: str) -> None:
    """As with kube-proxy, whose watches the server never compresses; the kubeconfig may disable it."""
    page = b'{"kind": "ServiceList", "metadata": {"resourceVersion": "1"}, "items": []}'
    with CannedServer(lambda _, connection: connection.sendall(whole(page))) as api:
        path = write_kubeconfig(tmp_path, {"server": api.url, "disable-compression": disabled})
        with Follower([api_watches(Client(path, qps=-1), "n1", SHORT)[0]]):
            eventually(lambda: len(api.headers) >= 2)
    encodings = [dict(headers)["accept-encoding"] for headers in api.headers]
    assert encodings[:2] == [encoding, "identity"]


def test_a_bomb_of_objects_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the first page, which has no limit."""
    monkeypatch.setattr(wire, "_MAX_OBJECTS", 10_000)
    item = b'{"metadata":{"name":"a"},"spec":{}}'
    head = b'{"kind":"ServiceList","metadata":{"resourceVersion":"1"},"items":['
    bomb = whole(gzip.compress(head + b",".join([item] * 1_000_000), 9), headers="Content-Encoding: gzip\r\n")
    with CannedServer(lambda _, connection: connection.sendall(bomb)) as canned:
        with pytest.raises(SourceError, match="no end: more than 10000 objects"):
            watches(canned.url, Kind.SERVICE)[0].once()
        assert len(canned.requests) == 1


def test_an_object_that_is_too_large_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In lists and watches, compressed or not. The log names it once per version, and an event follows."""
    limit, length = 300_000, 500_000
    monkeypatch.setattr(wire.page, "__defaults__", (limit,))
    monkeypatch.setattr(wire.lines, "__defaults__", (limit,))
    too_large = Key("default", "large")
    with server() as api, capture_logs() as lines:
        api.store.load(map(service, NAMES))
        api.store.create(long_service("large", length))
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees(*NAMES)
            eventually(lambda: Deleted(Kind.SERVICE, too_large, TOO_LARGE) in follower.events)
            # A smaller version is served, and so is any other object; a larger one is like a deletion.
            note = {"metadata": {"annotations": {"note": "short"}}}
            api.store.merge_patch(SERVICES, "default", "large", note)
            follower.sees(*NAMES, "large")
            api.store.create(long_service("larger", length))
            note["metadata"]["annotations"]["note"] = "x" * length
            api.store.merge_patch(SERVICES, "default", "large", note)
            api.store.create(service("new"))
            follower.sees(*NAMES, "new")
            api.store.delete(SERVICES, "default", "larger")
            api.store.create(service("newer"))
            follower.sees(*NAMES, "new", "newer")
            assert follower.lists() == 1
        assert len(api.requests.entries("watch")) == 1
    skipped = [str(line["reason"]) for line in lines if line["event"] == "object skipped"]
    assert skipped == [
        f"Service default/{name} is skipped: {TOO_LARGE}" for name in ("large", "larger", "large")
    ]
    assert not [line for line in lines if line["event"] == "watch failed"]


def test_the_reason_of_a_compressed_error_is_shown() -> None:
    """A proxy in between may compress short responses too."""
    status = gzip.compress(json.dumps({"kind": "Status", "message": "no role for you"}).encode())

    def answer(_: str, connection: socket.socket) -> None:
        connection.sendall(whole(status, "403 Forbidden", "Content-Encoding: gzip\r\n"))

    with CannedServer(answer) as canned, pytest.raises(SourceError, match=r"\(403: no role for you\)"):
        watches(canned.url, Kind.SERVICE)[0].once()
