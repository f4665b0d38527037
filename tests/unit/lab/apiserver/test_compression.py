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


@pytest.mark.parametrize(
    ("query", "accepted", "compressed"),
    [
        ("", "gzip", True),
        ("", "deflate,gzip , br", True),
        ("", "gzip;q=1", False),  # the real server compares with the word gzip
        ("?limit=20", "gzip", False),  # less than 128 KiB
        ("?watch=true&timeoutSeconds=1", "gzip", False),
    ],
)
def test_long_lists_are_compressed_on_request(
    filled: ApiServer, client: Client, query: str, accepted: str, compressed: bool
) -> None:
    """With the headers of the real server."""
    headers, body = ask(client, PATH + query, accepted)
    plain = ask(client, PATH + query, "identity")[1]
    if compressed:
        assert (headers["Content-Encoding"], headers["Vary"]) == ("gzip", "Accept-Encoding")
        assert gzip.decompress(body) == plain
    else:
        assert "Content-Encoding" not in headers
        assert body == plain
