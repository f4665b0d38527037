"""Allow one writer per network namespace, with an abstract unix socket as the lock.

Abstract names belong to the network namespace, as the tables do, and the kernel frees them when the process ends.
"""

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.processes import process
from pykubeproxy.wording import without_password

_NAME = "\0pykubeproxy"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_ONE_SECOND = struct.pack("@2l", 1, 0)  # struct timeval
_TRIES, _PAUSE = 3, 0.05  # seconds
# Each takes a file descriptor of the holder. A process that loses its connection tries again.
_MOST_WAITING = 8


class AlreadyRunning(KernelError):
    """Another pykubeproxy writes the tables of this network namespace.

    `pid` is its process id, 0 if it is not visible; `holder` describes it.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.holder = pid, _description(pid)
        super().__init__(
            f"another pykubeproxy, {self.holder}, manages the rules of this network namespace; stop it first"
        )


class InstanceLock:
    """The lock on the tables of the calling thread's network namespace, held until `close`.

    Raises AlreadyRunning while another process of root or of the same user holds it. Any user can take an abstract
    name, but other users cannot write the tables: they cause a warning only.
    """

    def __init__(self) -> None:
        # Of processes that wait. Replaced, never changed: other threads read it.
        self._clients: tuple[socket.socket, ...] = ()
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
            if _is_trusted(user):
                self._socket.close()
                raise AlreadyRunning(holder)
            time.sleep(_PAUSE)  # the holder may have just ended, or not listen yet
        self._socket.close()
        # Read-only commands import this module too, and start faster without structlog.
        import structlog

        structlog.get_logger().warning(
            "instance lock held by another user", user=user, advice="run one pykubeproxy per node only"
        )

    @classmethod
    def when_free(cls, waits_for: Callable[[str], None]) -> Self:
        """Take the lock as soon as no other process holds it; call `waits_for` with the description of each holder."""
        pid = -1
        while True:
            try:
                return cls()
            except AlreadyRunning as error:
                if error.pid != pid:
                    waits_for(error.holder)
                pid = error.pid
            time.sleep(_PAUSE)  # the holder may have closed the connection for lack of descriptors
            _wait_for_end(pid)

    def waiting(self) -> tuple[str, ...]:
        """Return the processes that wait for this lock. Any thread may call it."""
        return tuple(_description(pid) for client in self._clients if (pid := _waiting(client)) is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        with suppress(OSError):  # never held, or released before
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread, which would otherwise keep the name
        self._socket.close()
        for client in self._clients:
            client.close()

    def _accept(self) -> None:
        """Accept connections: a client gets the holder's pid from the kernel, and waits for the end of its connection."""
        while True:
            try:
                client = self._socket.accept()[0]
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):  # closed
                    return
                time.sleep(_PAUSE)  # such as out of file descriptors; a full queue would block clients
            else:
                self._keep(client)

    def _keep(self, newcomer: socket.socket) -> None:
        """Keep the connections of processes that still wait; those of other users would only take descriptors."""
        clients = (*self._clients, newcomer)
        waiting = [
            client for client in clients if _waiting(client) is not None and _is_trusted(_peer(client)[1])
        ]
        self._clients = tuple(waiting[-_MOST_WAITING:])
        for client in clients:
            if client not in self._clients:
                client.close()


def _holder() -> tuple[int, int]:
    """Return pid and user id of the lock's holder, 0 and -1 if nothing listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        # Not `settimeout`, which would not wait for a place in a full queue.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _ONE_SECOND)
        try:
            client.connect(_NAME)
        except OSError:
            return 0, -1
        return _peer(client)


def _wait_for_end(pid: int) -> None:
    """Return when the holder ends or closes the connection, or at once if it is not `pid`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, suppress(OSError):
        client.connect(_NAME)
        if _peer(client)[0] == pid:
            client.recv(1)


def _waiting(client: socket.socket) -> int | None:
    """Return the pid of a client that waits, None if it has closed the connection."""
    try:
        client.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        with suppress(OSError):
            return _peer(client)[0]
    except OSError:
        pass
    return None


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process at the other end; the pid is 0 if it is not visible."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def _is_trusted(user: int) -> bool:
    return user in (0, os.geteuid())


def _description(pid: int) -> str:
    running = process(pid) if pid else None
    command = " ".join(running.arguments) if running else "ended since"
    command = without_password("".join(filter(str.isprintable, command)))[:200]
    return f"process {pid} ({command})" if pid else "in another container"
