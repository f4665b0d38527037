"""Count the connections and bytes of agents at their sockets: a relay between them and the API server."""

import selectors
import socket
import threading
from contextlib import ExitStack, suppress
from typing import NamedTuple, Self

_READ_BYTES = 1 << 18


class Traffic(NamedTuple):
    """What agents sent and received so far, TLS included and TCP headers not, and their connections, open and in all."""

    sent: int = 0
    received: int = 0
    connections: int = 0
    open: int = 0

    def since(self, before: "Traffic") -> "Traffic":
        """Return the difference; `open` is the present number."""
        return Traffic(*(now - then for now, then in zip(self[:3], before[:3], strict=True)), self.open)


class Meter:
    """Forward connections to a port of 127.0.0.1 on one thread. A context manager."""

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self._wake, self._woken = socket.socketpair()
        self._resources = ExitStack()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def listen(self) -> int:
        """Listen on 127.0.0.1 in the network namespace of the calling thread. Return the port."""
        listener = self._resources.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._wake.send(b" ")
        return int(listener.getsockname()[1])

    def traffic(self) -> Traffic:
        """Return the traffic so far."""
        with self._lock:
            return self._traffic

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.close()
        self._thread.join()
        self._resources.close()
        self._woken.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    if not self._woken.recv(64):
                        return
                elif key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._forward(key.fileobj, *key.data)  # type: ignore[arg-type]

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        server = socket.create_connection(self._server)
        for connection in (client, server):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._resources.enter_context(connection)
        self._selector.register(client, selectors.EVENT_READ, (server, True))
        self._selector.register(server, selectors.EVENT_READ, (client, False))
        self._count(Traffic(connections=1, open=1))

    def _forward(self, source: socket.socket, sink: socket.socket, of_agent: bool) -> None:
        """Forward what can be read at once. Both sides always read, so a write does not wait for long."""
        try:
            data = source.recv(_READ_BYTES)
            sink.sendall(data)
        except OSError:
            data = b""
        self._count(Traffic(sent=len(data)) if of_agent else Traffic(received=len(data)))
        if data:
            return
        for connection in (source, sink):
            self._selector.unregister(connection)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._count(Traffic(open=-1))

    def _count(self, more: Traffic) -> None:
        with self._lock:
            self._traffic = Traffic(*(a + b for a, b in zip(self._traffic, more, strict=True)))
