"""A TCP relay in front of a server, such as a load balancer, an HTTP proxy or a SOCKS proxy."""

import contextlib
import ipaddress
import socket
import threading
from types import TracebackType
from typing import Self


class Relay:
    """Forward connections to a port of 127.0.0.1; a context manager.

    `accepted` counts connections. With `proxy`, answer CONNECT requests first, with `socks` those of SOCKS5; `asked` has
    what they ask for, and the login. `reply` is the answer of the SOCKS proxy, 0 for success. While `frozen` is set,
    acknowledge all data and forward nothing; a connection that lost data stays so.
    """

    def __init__(self, port: int, *, proxy: bool = False, socks: bool = False, reply: int = 0) -> None:
        self.frozen = threading.Event()
        self.accepted = 0
        self.asked: list[str] = []
        self._target, self._proxy, self._socks, self._reply = port, proxy, socks, reply
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

    def refuse(self) -> None:
        """Refuse new connections; the others stay open."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

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
                self.asked.append(head.decode())
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            if self._socks and not self._answer_socks(client):
                client.close()
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets.append(server)
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            self._forward(server, client)

    def _answer_socks(self, client: socket.socket) -> bool:
        def text() -> str:
            return client.recv(client.recv(1)[0]).decode()

        methods = client.recv(client.recv(2)[1])
        client.sendall(b"\x05" + methods[-1:])
        if methods[-1:] == b"\x02":
            client.recv(1)
            self.asked.append(f"{text()}:{text()}")
            client.sendall(b"\x01\x00")
        kind = client.recv(4)[3]
        host = text() if kind == 3 else str(ipaddress.ip_address(client.recv({1: 4, 4: 16}[kind])))
        self.asked.append(f"{host}:{int.from_bytes(client.recv(2))}")
        client.sendall(bytes([5, self._reply, 0, 1]) + bytes(6))
        return self._reply == 0

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        has_lost = False
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                has_lost = has_lost or self.frozen.is_set()
                if not has_lost:
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
