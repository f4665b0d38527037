"""A client for HTTP servers on this machine, and the responses recorded from kube-proxy."""

import contextlib
import gzip
import http.client
import random
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pykubeproxy.http import Handler, Limits
from pykubeproxy.http.exchange import serve
from tests.fakes.waiting import PATIENCE

RECORDING = Path(__file__).parent.parent / "data" / "http.txt"
# Headers of the connection, which the recording omits.
TRANSPORT = {"Date", "Connection"}


class Response(NamedTuple):
    """A server's response."""

    status: int
    headers: Mapping[str, str]
    body: str


def fetch(
    port: int,
    path: str = "/",
    method: str = "GET",
    host: str = "127.0.0.1",
    accept: str = "",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Send one request. A compressed response is unpacked."""
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    try:
        sent = {**({"Accept": accept} if accept else {}), **(headers or {})}
        connection.request(method, path, headers=sent)
        response = connection.getresponse()
        body, received = response.read(), dict(response.getheaders())
        if received.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        return Response(response.status, received, body.decode())
    finally:
        connection.close()


def send_bytes(port: int, request: bytes) -> bytes:
    """Send these bytes; return everything until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(request)
        response = bytearray()
        while piece := connection.recv(65536):
            response += piece
        return bytes(response)


def exchange(raw: bytes, handler: Handler) -> bytes:
    """Return the response to these bytes on a connection that the client then half-closes."""
    client, server = socket.socketpair()
    with client, server:
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            serve(server, handler, Limits(), lambda: None)
        server.close()
        return client.makefile("rb").read()


def free_port() -> int:
    """Return an unused port outside the kernel's range of ephemeral ports."""
    while True:
        port = random.randrange(10000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def recorded_response(title: str) -> Response:
    """Return the recorded response with this title."""
    section = re.split(r"^### ", RECORDING.read_text(), flags=re.MULTILINE)
    (text,) = (
        section_text.removeprefix(title + "\n")
        for section_text in section
        if section_text.startswith(title + "\n")
    )
    if not text.startswith("HTTP/"):
        return Response(200, {}, text)
    head, _, rest = text.partition("\n\n")
    status, *lines = head.splitlines()
    headers = dict(line.split(": ", 1) for line in lines)
    body = rest.encode()[: int(headers["Content-Length"])].decode()
    return Response(int(status.split()[1]), headers, body)
