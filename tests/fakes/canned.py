"""An HTTP server on a real socket that sends scripted responses, valid or not."""

import re
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

Answer = Callable[[str, socket.socket], None]


def whole(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """Return a complete HTTP response, the last on its connection."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{_LAST}{headers}\r\n".encode() + body


# Otherwise the next request may meet the closing connection and get a reset.
_LAST = "Connection: close\r\n"
CHUNKED = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n{_LAST}\r\n".encode()


def chunk(body: bytes) -> bytes:
    """Return one chunk; an empty one ends the response."""
    return b"%x\r\n%s\r\n" % (len(body), body)


class CannedServer:
    """Calls `answer(target, connection)` for each request and closes the connection after it; a context manager.

    `requests` has the targets, `headers` the name and value of each header of each request.
    """

    def __init__(self, answer: Answer) -> None:
        self.requests: list[str] = []
        self.headers: list[list[tuple[str, str]]] = []
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._socket.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except OSError:
            return

    def _serve(self, connection: socket.socket) -> None:
        try:
            head = body = b""
            length = 0
            # Closing a socket with unread data sends a reset, which may overtake the response.
            while not head or len(body) < length:
                piece = connection.recv(65536)
                if not piece:
                    return
                body += piece
                if not head and b"\r\n\r\n" in body:
                    head, _, body = body.partition(b"\r\n\r\n")
                    found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                    length = int(found[1]) if found else 0
            target = head.split()[1].decode()
            self.requests.append(target)
            lines = (line.partition(": ") for line in head.decode().split("\r\n")[1:])
            self.headers.append([(name.lower(), value) for name, _, value in lines])
            self._answer(target, connection)
        except OSError:
            pass
        finally:
            connection.close()
