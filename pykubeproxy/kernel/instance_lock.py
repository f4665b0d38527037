"""Allow one writer per network namespace, with an abstract unix socket as the lock.

Abstract names belong to the network namespace, as the tables do, and the kernel frees them when the process ends.
"""

import errno
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Self

from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.processes import process

_NAME = "\0pykubeproxy"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_TRIES, _PAUSE = 3, 0.05  # seconds


class AlreadyRunning(KernelError):
    """Another pykubeproxy writes the tables of this network namespace; `holder` is its pid, 0 if it is not visible."""

    def __init__(self, holder: int) -> None:
        running = process(holder) if holder else None
        command = " ".join(running.arguments) if running else "ended since"
        command = "".join(filter(str.isprintable, command))[:200]
        where = f"process {holder} ({command})" if holder else "in another container"
        super().__init__(
            f"another pykubeproxy, {where}, manages the rules of this network namespace; stop it first"
        )


class InstanceLock:
    """The lock on the tables of the calling thread's network namespace, held until `close`.

    Raises AlreadyRunning while another process of root or of the same user holds it. Any user can take an abstract
    name, but other users cannot write the tables: they cause a warning only.
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
                threading.Thread(target=self._accept, name="instance-lock", daemon=True).start()
                return
            if user in (0, os.geteuid()):
                self._socket.close()
                raise AlreadyRunning(holder)
            time.sleep(_PAUSE)  # the holder may have just ended, or not listen yet
        self._socket.close()
        # Read-only commands import this module too, and start faster without structlog.
        import structlog

        structlog.get_logger().warning(
            "instance lock held by another user", user=user, advice="run one pykubeproxy per node only"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        with suppress(OSError):  # never held, or released before
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread, which would otherwise keep the name
        self._socket.close()

    def _accept(self) -> None:
        """Accept and close connections: a client gets the holder's pid from the kernel."""
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):  # closed
                    return
                time.sleep(_PAUSE)  # such as out of file descriptors; a full queue would block clients


def _holder() -> tuple[int, int]:
    """Return pid and user id of the lock's holder, 0 and -1 if nothing listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(_NAME)
        except OSError:
            return 0, -1
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user
