"""Asking an HTTP server on this machine, politely or not, and what kube-proxy was recorded to answer."""

import contextlib
import http.client
import random
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pykubeproxy.http import Handler, Limits
from pykubeproxy.http.exchange import serve

RECORDING = Path(__file__).parent.parent / "data" / "http.txt"
# Headers of the connection rather than of the answer; the recording is without them.
TRANSPORT = {"Date", "Connection"}


class Asked(NamedTuple):
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: str


def ask(port: int, path: str = "/", method: str = "GET", host: str = "127.0.0.1", accept: str = "") -> Asked:
    """One request."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request(method, path, headers={"Accept": accept} if accept else {})
        answer = connection.getresponse()
        return Asked(answer.status, dict(answer.getheaders()), answer.read().decode())
    finally:
        connection.close()


def send(port: int, request: bytes) -> bytes:
    """What comes back for these very bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        answer = bytearray()
        while piece := connection.recv(65536):
            answer += piece
        return bytes(answer)


def exchange(raw: bytes, handler: Handler) -> bytes:
    """Return the answer to these bytes on a connection that the client then half-closes."""
    client, server = socket.socketpair()
    with client, server:
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            serve(server, handler, Limits(), lambda: None)
        server.close()
        return client.makefile("rb").read()


def free_port() -> int:
    """A port that nobody listens on, not one of those that the kernel gives to whoever asks for any."""
    while True:
        port = random.randrange(10000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def recorded(title: str) -> Asked:
    """What stands in the recording under this heading."""
    section = re.split(r"^### ", RECORDING.read_text(), flags=re.MULTILINE)
    (text,) = (it.removeprefix(title + "\n") for it in section if it.startswith(title + "\n"))
    if not text.startswith("HTTP/"):
        return Asked(200, {}, text)
    head, _, rest = text.partition("\n\n")
    status, *lines = head.splitlines()
    headers = dict(line.split(": ", 1) for line in lines)
    body = rest.encode()[: int(headers["Content-Length"])].decode()
    return Asked(int(status.split()[1]), headers, body)
