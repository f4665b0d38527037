"""One attempt at a request, on a thread of its own, so that its caller can stop waiting at any time."""

import contextlib
import math
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator

# Parts that the thread reads ahead of its caller.
_AHEAD = 4
# struct tcp_info: the offset of tcpi_last_ack_recv, and a value of tcpi_state.
_ACKNOWLEDGED, _ESTABLISHED = 56, 1

_local = threading.local()


class OutOfTime(Exception):
    """The next part did not arrive in time; str() says what was missing, such as "response from"."""


class Attempt:
    """Run `produce` on a thread of its own and hand over its parts one by one.

    The thread may hang in a name server, a credential plugin or a slow response: `take` returns in time regardless. The
    caller must call `cancel` at the end: it wakes the thread if it waits on a socket.
    """

    def __init__(self, produce: Callable[[], Generator[bytes, None, None]]) -> None:
        self.missing = "response from"
        self.acknowledged = -math.inf  # when the connection ended: the peer's last acknowledgement, monotonic
        self._parts: queue.Queue[bytes | Exception | None] = queue.Queue(_AHEAD)
        self._lock = threading.Lock()
        self._cancelled = False
        self._handles: list[socket.socket] = []
        threading.Thread(target=self._run, args=(produce,), name="api-request", daemon=True).start()

    def take(self, seconds: float) -> bytes | None:
        """Return the next part, None at the end. Raises OutOfTime, or what `produce` raised."""
        try:
            part = self._parts.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise OutOfTime(self.missing) from None
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self) -> None:
        """Shut down the connection if the thread still uses it, and drop further parts."""
        with self._lock:
            self._cancelled = True
            for handle in self._handles:
                _shut_down(handle)
        with contextlib.suppress(queue.Empty):
            while True:
                self._parts.get_nowait()

    def hold(self, connection: socket.socket) -> None:
        """Let `cancel` shut down this connection, which may still be in its TLS handshake."""
        # A duplicate: TLS detaches the original, and a closed number may belong to another connection.
        handle = socket.socket(fileno=os.dup(connection.fileno()))
        with self._lock:
            self._handles.append(handle)
            if self._cancelled:
                _shut_down(handle)

    def unacknowledged(self) -> float:
        """Return the seconds since the peer acknowledged a packet; infinity if it was never connected."""
        with self._lock:
            ended = time.monotonic() - self.acknowledged
            return min((_since_acknowledgement(handle) for handle in self._handles), default=ended)

    def _run(self, produce: Callable[[], Generator[bytes, None, None]]) -> None:
        _local.attempt = self
        end: Exception | None = None
        try:
            with contextlib.closing(produce()) as parts:
                for part in parts:
                    self._parts.put(part)
                    if self._cancelled:
                        break
        except Exception as error:
            end = error
        finally:
            with self._lock:
                for handle in self._handles:
                    self.acknowledged = max(self.acknowledged, time.monotonic() - _acknowledgement(handle)[1])
                    handle.close()
                self._handles.clear()
        self._parts.put(end)


def current() -> Attempt:
    """Return the attempt that runs on this thread."""
    attempt: Attempt = _local.attempt
    return attempt


def _since_acknowledgement(connection: socket.socket) -> float:
    connected, seconds = _acknowledgement(connection)
    return seconds if connected else math.inf


def _acknowledgement(connection: socket.socket) -> tuple[bool, float]:
    """Return whether the peer is connected, and the seconds since it acknowledged a packet.

    Read struct tcp_info: the state is its first byte, tcpi_last_ack_recv has milliseconds.
    """
    if sys.platform != "linux":
        return True, 0.0  # not reported; keepalive ends a dead connection
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED + 4)
    (milliseconds,) = struct.unpack_from("=I", info, _ACKNOWLEDGED)
    return info[0] == _ESTABLISHED, float(milliseconds) / 1000


def _shut_down(handle: socket.socket) -> None:
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)
