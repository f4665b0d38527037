"""The server's side of exec over WebSocket, frame by frame."""

import base64
import hashlib
import json
import socket
from typing import Any

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
V5 = "v5.channel.k8s.io"
STDOUT, STDERR, STATUS = 1, 2, 3
SUCCESS: dict[str, Any] = {"status": "Success"}


def accept(connection: socket.socket, headers: list[tuple[str, str]], protocol: str = V5) -> None:
    """Accept the upgrade of a request with these headers."""
    key = dict(headers)["sec-websocket-key"]
    digest = base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
    connection.sendall(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {digest}\r\nSec-WebSocket-Protocol: {protocol}\r\n\r\n".encode()
    )


def message(channel: int, content: bytes) -> bytes:
    """Return a binary frame on a channel."""
    return _frame(0x2, bytes([channel]) + content)


def status(content: dict[str, Any]) -> bytes:
    """Return the frame with the status of the command."""
    return message(STATUS, json.dumps(content).encode())


def exit_status(code: int, text: str = "") -> bytes:
    """Return the frame for a command that ended with an exit code other than 0."""
    cause = {"reason": "ExitCode", "message": str(code)}
    return status(
        {"status": "Failure", "reason": "NonZeroExitCode", "message": text, "details": {"causes": [cause]}}
    )


def end() -> bytes:
    """Return the frame that closes the connection."""
    return _frame(0x8, (1000).to_bytes(2, "big"))


def _frame(opcode: int, payload: bytes) -> bytes:
    size = len(payload)
    length = bytes([size]) if size < 126 else b"\x7f" + size.to_bytes(8, "big")
    return bytes([0x80 | opcode]) + length + payload
