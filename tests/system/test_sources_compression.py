"""Lists that the API server or a proxy in between compresses."""

import functools
import gzip
import json
import socket
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from structlog.testing import capture_logs

from pykubeproxy.http import Handler, Request, Response
from pykubeproxy.lab.apiserver import ApiServer
from pykubeproxy.objects import Kind, Listed
from pykubeproxy.sources import Client, SourceError, api_watches, wire
from tests.fakes.canned import CannedServer, whole
from tests.fakes.cluster import server, service, watches
from tests.fakes.follower import Follower, eventually

NAMES = [f"s{number:03}" for number in range(300)]


def long_service(name: str) -> dict[str, Any]:
    """A Service of about a kilobyte."""
    made = service(name)
    made["metadata"]["annotations"] = {"note": "x" * 500}
    return made


class Exchange(NamedTuple):
    """The Accept-Encoding of a request, and the Content-Encoding of its response."""

    watch: bool
    accepted: str
    encoding: str | None


def recording_server(exchanges: list[Exchange]) -> ApiServer:
    """Return a server with 300 Services that records its exchanges."""

    def middleware(handler: Handler) -> Handler:
        def handle(request: Request) -> Response:
            response = handler(request)
            accepted, headers = request.headers.get("accept-encoding", ""), dict(response.headers)
            exchanges.append(
                Exchange("watch=true" in request.query, accepted, headers.get("Content-Encoding"))
            )
            return response

        return handle

    api = ApiServer(middleware=middleware)
    api.store.load(map(long_service, NAMES))
    return api


def test_lists_are_compressed_and_watches_are_not() -> None:
    """As with kube-proxy, whose watches the server never compresses."""
    exchanges: list[Exchange] = []
    with recording_server(exchanges) as api, Follower(watches(api.url, Kind.SERVICE)) as follower:
        follower.sees(*NAMES)
        eventually(lambda: len(exchanges) >= 2)
        api.store.create(service("new"))
        follower.sees(*NAMES, "new")
    assert exchanges[:2] == [Exchange(False, "gzip", "gzip"), Exchange(True, "identity", None)]


def test_kubeconfig_can_disable_compression(tmp_path: Path) -> None:
    exchanges: list[Exchange] = []
    with recording_server(exchanges) as api:
        file = api.kubeconfig(tmp_path / "kubeconfig")
        content = yaml.safe_load(file.read_text())
        content["clusters"][0]["cluster"]["disable-compression"] = True
        file.write_text(yaml.safe_dump(content))
        services, *_ = api_watches(Client(str(file)), "n1")
        (listed,) = services.once()
    assert isinstance(listed, Listed)
    assert len(listed.objects) == len(NAMES)
    assert exchanges == [Exchange(False, "identity", None)]


def test_an_incomplete_compressed_list_is_retried() -> None:
    """It is one warning, even if the HTTP response is complete."""
    with server() as api, capture_logs() as lines:
        api.store.load(map(long_service, NAMES))
        api.faults.truncate(2, verb="list")
        with Follower(watches(api.url, Kind.SERVICE)) as follower:
            follower.sees(*NAMES)
    reasons = [str(line["reason"]) for line in lines if line["log_level"] == "warning"]
    assert len(reasons) == 1
    assert reasons[0].startswith("the API server's response ended in the middle of gzip data")


def test_a_bomb_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit the rest is not unpacked; smaller pages are tried too."""
    monkeypatch.setattr(wire, "page", functools.partial(wire.page, limit=1 << 20))
    bomb = whole(gzip.compress(bytes(1 << 28), 9), headers="Content-Encoding: gzip\r\n")
    with CannedServer(lambda _, connection: connection.sendall(bomb)) as canned:
        with pytest.raises(SourceError, match="a list of more than 1048576 bytes"):
            watches(canned.url, Kind.SERVICE)[0].once()
        limits = [target.partition("limit=")[2] for target in canned.requests]
    assert limits == ["500&resourceVersion=0", "500", "50", "5"]


def test_a_list_that_is_too_large_is_read_in_smaller_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thus no tenant with large objects can stop the lists of all nodes. Pages grow again after large objects."""
    monkeypatch.setattr(wire, "page", functools.partial(wire.page, limit=30_000))
    with server() as api:
        api.store.load(map(long_service, NAMES))
        (listed,) = watches(api.url, Kind.SERVICE)[0].once()
        queries = [entry.query for entry in api.requests.entries("list")]
    assert isinstance(listed, Listed)
    assert [it.key.name for it in listed.objects] == NAMES
    limits = [int(query.partition("limit=")[2].partition("&")[0]) for query in queries]
    assert limits[:8] == [500, 500, 50, 5, 10, 20, 40, 4]


def test_the_reason_of_a_compressed_error_is_shown() -> None:
    """A proxy in between may compress short responses too."""
    status = gzip.compress(json.dumps({"kind": "Status", "message": "no role for you"}).encode())

    def answer(_: str, connection: socket.socket) -> None:
        connection.sendall(whole(status, "403 Forbidden", "Content-Encoding: gzip\r\n"))

    with CannedServer(answer) as canned, pytest.raises(SourceError, match=r"\(403: no role for you\)"):
        watches(canned.url, Kind.SERVICE)[0].once()
