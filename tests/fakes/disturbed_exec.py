"""An exec over a WebSocket that breaks off, or waits, at its first output."""

import socket
from collections.abc import Callable
from typing import Any, cast

from pykubeproxy.http import Response, Upgrade

# Bytes of an exec to send before its disturbance: less than any status.
OUTPUT_BYTES = 16


def drop(connection: socket.socket) -> None:
    """Close the connection."""
    connection.shutdown(socket.SHUT_RDWR)


def disturbed(upgrade: Upgrade, disturb: Callable[[socket.socket], None]) -> Response:
    """Return an exec that calls `disturb` at its first output."""

    def upgraded(connection: socket.socket, received: bytes) -> None:
        upgrade(cast("socket.socket", _DisturbedSocket(connection, disturb)), received)

    return Response(upgrade=upgraded)


class _DisturbedSocket:
    """Sends the handshake of a WebSocket and some bytes, then calls `disturb`, and then sends the rest."""

    def __init__(self, connection: socket.socket, disturb: Callable[[socket.socket], None]) -> None:
        self._connection = connection
        self._disturb = disturb
        self._left: int | None = None  # bytes until the disturbance

    def send(self, data: bytearray) -> int:
        if self._left is None:  # the first piece has the whole handshake
            self._left = data.index(b"\r\n\r\n") + 4 + OUTPUT_BYTES
        if self._left == 0:
            self._disturb(self._connection)
            self._left = 1 << 62
        sent = self._connection.send(data[: self._left])
        self._left -= sent
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)
