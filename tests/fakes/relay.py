"""A TCP relay in front of a server, such as a load balancer or an HTTP proxy."""

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Relay:
    """Forward connections to a port of 127.0.0.1; a context manager.

    `accepted` counts connections. With `proxy`, answer CONNECT requests first. While `frozen` is set, acknowledge all
    data and forward nothing.
    """

    def __init__(self, port: int, *, proxy: bool = False) -> None:
        self.frozen = threading.Event()
        self.accepted = 0
        self._target, self._proxy = port, proxy
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                self._sockets.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._proxy:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += client.recv(1)
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets.append(server)
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            self._forward(server, client)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.frozen.is_set():
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
