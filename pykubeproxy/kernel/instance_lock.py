"""One writer for each network namespace: whoever holds a unix socket of a certain name.

The name is abstract: it belongs to the network namespace, as the tables do, and the kernel takes it back when its
holder ends, however that comes about. No file is left over, and none has to be written.
"""

import errno
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.processes import process

_NAME = "\0pykubeproxy"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_UNKNOWN = (0, -1)
_TRIES, _PAUSE = 3, 0.05  # seconds


class AlreadyRunning(KernelError):
    """Another pykubeproxy writes the tables of this network namespace; `holder` is its pid, 0 if it cannot be seen."""

    def __init__(self, holder: int) -> None:
        found = process(holder) if holder else None
        words = "".join(c for c in " ".join(found.arguments) if c.isprintable())[:200] if found else ""
        who = f"process {holder} ({words or 'gone by now'})" if holder else "in another container"
        super().__init__(
            f"another pykubeproxy, {who}, keeps the rules of this network namespace; stop it first, "
            "for two would undo each other's work"
        )
        self.holder = holder


class InstanceLock:
    """The right to write the tables of the network namespace in which it was made, until `close`.

    Raises AlreadyRunning while another process of root, or of the same user, has it. Any user may take an abstract
    name; one
    who could not write the tables anyway is told of in the log and does not keep us from it.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for _ in range(_TRIES):
            try:
                self._socket.bind(_NAME)
            except OSError:
                holder, user = _holder()
            else:
                self._socket.listen()
                threading.Thread(target=self._hang_up, name="sole", daemon=True).start()
                return
            if user in (0, os.geteuid()):
                self._socket.close()
                raise AlreadyRunning(holder)
            time.sleep(_PAUSE)  # it may be gone since, or just about to listen
        self._socket.close()
        # Commands that only look import this room too, and need not wait for it.
        import structlog

        structlog.get_logger().warning(
            "cannot tell whether another pykubeproxy runs: somebody else has its lock", user=user
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give it up."""
        with suppress(OSError):  # never had, or given up before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which would keep the name otherwise
        self._socket.close()

    def _hang_up(self) -> None:
        """Who asks has learned from the kernel whom it asked; nothing is said."""
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):  # closed
                    return
                time.sleep(_PAUSE)  # out of file descriptors, say: once nobody accepts, nobody can ask


def _holder() -> tuple[int, int]:
    """Process and user of who has the name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(_NAME)
        except OSError:
            return _UNKNOWN
        raw = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user
