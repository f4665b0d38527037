"""Compressed responses."""

import gzip
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import ApiServer
from tests.unit.lab.apiserver.conftest import Client, Maker

PATH = "/api/v1/services"


@pytest.fixture
def filled(server: ApiServer, service: Maker) -> ApiServer:
    """A server whose list of services is longer than 128 KiB."""
    for number in range(40):
        made = service(f"s{number}")
        made["metadata"]["annotations"] = {"note": "x" * 4000}
        server.store.create(made)
    return server


def ask(client: Client, path: str, accepted: Any) -> Any:
    """Status, encoding and raw body of a response."""
    headers = {"Accept-Encoding": accepted}
    response = client.pool.request("GET", client.server.url + path, headers=headers, decode_content=False)
    assert response.status == 200
    return response.headers, response.data


@pytest.mark.parametrize("accepted", ["gzip", "br, gzip", "deflate,gzip , br"])
def test_long_lists_are_compressed_on_request(filled: ApiServer, client: Client, accepted: Any) -> None:
    """With the headers of the real server."""
    headers, body = ask(client, PATH, accepted)
    assert (headers["Content-Encoding"], headers["Vary"]) == ("gzip", "Accept-Encoding")
    assert headers["Content-Type"] == "application/json"
    assert gzip.decompress(body) == ask(client, PATH, "identity")[1]
    assert len(body) < 10_000


@pytest.mark.parametrize("accepted", ["", "identity", "br", "gzip;q=1", "GZIP", "*"])
def test_lists_are_not_compressed_without_request(filled: ApiServer, client: Client, accepted: Any) -> None:
    """The real server compares with the word gzip."""
    headers, body = ask(client, PATH, accepted)
    assert "Content-Encoding" not in headers
    assert "Vary" not in headers
    assert body.startswith(b'{"kind":"ServiceList"')


def test_responses_up_to_128_kib_are_not_compressed(filled: ApiServer, client: Client) -> None:
    """The limit is the real server's."""
    headers, body = ask(client, f"{PATH}?limit=20", "gzip")
    assert "Content-Encoding" not in headers
    assert 64 * 1024 < len(body) <= 128 * 1024


def test_watches_are_never_compressed(filled: ApiServer, client: Client) -> None:
    """Not even one that begins with many objects."""
    headers, body = ask(client, f"{PATH}?watch=true&timeoutSeconds=1", "gzip")
    assert "Content-Encoding" not in headers
    assert len(body) > 128 * 1024
