"""A small HTTP server: which addresses it listens on, and how many it serves at a time."""

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import structlog

from pykubeproxy.agent.http import Page, exchange

CONNECTIONS = 32
_BACKLOG = 128

log = structlog.get_logger()


class Server:
    """Any number of addresses to listen on, and one thread that accepts for all of them.

    At most `connections` are served at a time, each in a thread. When one more comes the one that has been open the
    longest is cut off: honest clients are done within milliseconds, so it is most likely one that stalls.
    """

    def __init__(self, name: str, connections: int = CONNECTIONS) -> None:
        self._name = name
        self._slots = threading.BoundedSemaphore(connections)
        self._poll = select.epoll()
        self._wake = os.eventfd(0)
        self._poll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        self._listening: dict[int, tuple[socket.socket, Page]] = {}
        self._open: dict[socket.socket, None] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def listen(self, host: str, port: int, page: Page) -> Callable[[], None]:
        """Answer at one more address with `page`; returns what ends that. Raises OSError, as when the port is taken.

        `host` "" is every address of this node, "0.0.0.0" every IPv4 and "::" every IPv6 one.
        """
        listener = _bind(host, port)
        listener.setblocking(False)
        number = listener.fileno()
        with self._lock:
            if self._closing:
                listener.close()
                raise OSError(errno.ESHUTDOWN, "the server is closed")
            self._listening[number] = listener, page
            self._poll.register(number, select.EPOLLIN)

        def close() -> None:
            with self._lock:
                if self._listening.pop(number, (None,))[0] is listener:
                    self._poll.unregister(number)
                    listener.close()

        return close

    def addresses(self) -> list[tuple[str, int]]:
        """Where it listens now, as (IP, port)."""
        with self._lock:
            return [listener.getsockname()[:2] for listener, _ in self._listening.values()]

    def close(self) -> None:
        """Stop listening and cut off whoever is being served."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            for listener, _ in self._listening.values():
                listener.close()
            self._listening.clear()
            for connection in self._open:
                _cut(connection)
        self._poll.close()
        os.close(self._wake)

    def _accept(self) -> None:
        while not self._closing:
            for number, _ in self._poll.poll():
                with self._lock:
                    listener, page = self._listening.get(number, (None, None))
                if listener is None or page is None or self._closing:
                    continue
                try:
                    connection, _address = listener.accept()
                except BlockingIOError:  # the client has left again
                    continue
                except OSError as error:  # out of file descriptors, or the listener was closed
                    log.debug("no connection accepted", server=self._name, error=str(error))
                    time.sleep(0.05)
                    continue
                self._start(connection, page)

    def _start(self, connection: socket.socket, page: Page) -> None:
        if not self._slots.acquire(blocking=False):
            with self._lock:
                if oldest := next(iter(self._open), None):
                    _cut(oldest)
            if not self._slots.acquire(timeout=1.0):
                connection.close()
                return
        with self._lock:
            self._open[connection] = None
        try:
            threading.Thread(
                target=self._serve, args=(connection, page), name=f"{self._name}-request", daemon=True
            ).start()
        except RuntimeError:  # no more threads to be had: a limit of the system
            self._end(connection)

    def _serve(self, connection: socket.socket, page: Page) -> None:
        try:
            exchange(connection, page)
        except OSError:
            pass  # the client has left, or was too slow
        except Exception:
            log.exception("a page could not be made", server=self._name)
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(connection, None)
            connection.close()
        self._slots.release()


def _bind(host: str, port: int) -> socket.socket:
    try:
        return _listener(host, port)
    except OSError as error:
        # Without the words on the attempt that Python adds; the caller names the address in its own.
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno)) from None


def _listener(host: str, port: int) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _cut(connection: socket.socket) -> None:
    """Make whatever another thread does with the connection fail; closing it is up to that thread."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
