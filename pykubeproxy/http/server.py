"""The server: listening addresses, one thread that accepts, and one bounded thread per connection."""

import contextlib
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network
from typing import NamedTuple

import structlog

from pykubeproxy.http import Handler, Limits
from pykubeproxy.http.exchange import plain_address, serve

_BACKLOG = 128

log = structlog.get_logger()


#: An IPv4 address, or the network of 64 bits of an IPv6 one, whose hosts choose the rest.
_Client = IPv4Address | IPv6Address | IPv6Network


class _ListeningSocket(NamedTuple):
    socket: socket.socket
    handler: Handler
    tls: ssl.SSLContext | None


class Server:
    """An HTTP server on any number of addresses. It depends on no other thread of the process.

    At `limits.connections`, a new connection ends another one, of the client with most connections, the new one included:
    the one whose latest request began first. It is most likely idle or stalled, since honest clients finish within
    milliseconds. So connections of one client do not end those of others.
    """

    def __init__(self, name: str, limits: Limits | None = None) -> None:
        self._name = name
        self._limits = limits or Limits()
        self._slots = threading.BoundedSemaphore(self._limits.connections)
        self._poll = select.epoll()
        self._wake = os.eventfd(0)
        self._poll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        self._listening: dict[int, _ListeningSocket] = {}
        # With their clients, by the start of their latest request.
        self._open: OrderedDict[socket.socket, _Client] = OrderedDict()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def listen(
        self, host: str, port: int, handler: Handler, tls: ssl.SSLContext | None = None
    ) -> Callable[[], None]:
        """Serve `handler` on one more address; return a function that stops it. Raises OSError if the bind fails.

        The host "" stands for every address of this node, "0.0.0.0" for every IPv4 and "::" for every IPv6 one.
        """
        listening = _bind(host, port)
        listening.setblocking(False)
        number = listening.fileno()
        with self._lock:
            if self._closing:
                listening.close()
                raise OSError(errno.ESHUTDOWN, "the server is closed")
            listener = self._listening[number] = _ListeningSocket(listening, handler, tls)
            self._poll.register(number, select.EPOLLIN)

        def close() -> None:
            with self._lock:
                if self._listening.get(number) is listener:
                    del self._listening[number]
                    self._poll.unregister(number)
                    listening.close()

        return close

    def addresses(self) -> list[tuple[str, int]]:
        """Return the listening addresses as (IP, port)."""
        with self._lock:
            return [listener.socket.getsockname()[:2] for listener in self._listening.values()]

    def drop_connections(self) -> None:
        """End all open connections; keep listening."""
        with self._lock:
            for connection in self._open:
                _shut_down(connection)

    def close(self) -> None:
        """Stop listening and end all connections."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            for listener in self._listening.values():
                listener.socket.close()
            self._listening.clear()
        self.drop_connections()
        self._poll.close()
        os.close(self._wake)

    def _accept(self) -> None:
        while not self._closing:
            for number, _ in self._poll.poll():
                with self._lock:
                    listener = self._listening.get(number)
                if listener is None or self._closing:
                    continue
                try:
                    connection, address = listener.socket.accept()
                    if listener.tls:
                        connection = listener.tls.wrap_socket(
                            connection, server_side=True, do_handshake_on_connect=False
                        )
                except BlockingIOError:  # the client has left
                    continue
                except OSError:  # out of file descriptors, or the listener was closed
                    time.sleep(0.05)
                    continue
                self._start(connection, _client(address[0]), listener.handler)

    def _start(self, connection: socket.socket, client: _Client, handler: Handler) -> None:
        if not self._slots.acquire(blocking=False):
            with self._lock:
                if oldest := self._oldest_of_largest_client(client):
                    _shut_down(oldest)
            if not self._slots.acquire(timeout=1.0):
                connection.close()
                return
        with self._lock:
            self._open[connection] = client
        try:
            threading.Thread(
                target=self._serve, args=(connection, handler), name=f"{self._name}-request", daemon=True
            ).start()
        except RuntimeError:  # the system allows no more threads
            self._end(connection)

    def _oldest_of_largest_client(self, newcomer: _Client) -> socket.socket | None:
        """Return the oldest connection of the client with most, where `newcomer` has one more; call with the lock."""
        counts = Counter((newcomer, *self._open.values()))
        most = max(counts[client] for client in self._open.values()) if self._open else 0
        return next((connection for connection, client in self._open.items() if counts[client] == most), None)

    def _serve(self, connection: socket.socket, handler: Handler) -> None:
        def on_request() -> None:
            with self._lock:
                self._open.move_to_end(connection)

        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if isinstance(connection, ssl.SSLSocket):
                connection.settimeout(self._limits.request_seconds)
                connection.do_handshake()
            serve(connection, handler, self._limits, on_request)
        except OSError:
            pass  # the client has left, is too slow, or rejects the certificate
        except Exception:
            log.exception("request handler failed", server=self._name)
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(connection, None)
            connection.close()
        self._slots.release()


def _bind(host: str, port: int) -> socket.socket:
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        # Without the text that Python adds: callers name the address themselves.
        raise OSError(error.errno, os.strerror(error.errno or 0)) from None


def _client(host: str) -> _Client:
    address = plain_address(host)
    return IPv6Network((int(address), 64), strict=False) if address.version == 6 else address


def _shut_down(connection: socket.socket) -> None:
    """Make all calls on the connection fail, so that its own thread closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # without the exchange that ends TLS
