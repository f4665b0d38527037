"""Allow one writer of the tables of a network namespace, with a lock on a file that only root can open.

The kernel releases the lock when the process ends, and wakes up one of those that wait for it.
"""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.system import lockers, process
from pykubeproxy.wording import without_password

# Agents in different containers share this folder of the node. A container without it, even of root, cannot take the lock.
FOLDER = Path("/run/pykubeproxy")


class AlreadyRunning(KernelError):
    """Another pykubeproxy writes the tables of this network namespace."""

    def __init__(self) -> None:
        super().__init__(
            f"another pykubeproxy, {lock_holder()}, manages the rules of this network namespace; stop it first"
        )


class NoLock(KernelError):
    """The file of the lock cannot be opened."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"cannot open the instance lock {error.filename or FOLDER}: {error.strerror};"
            f" run as root, and mount {FOLDER} from the node into a container"
        )


class InstanceLock:
    """The lock on the tables of the calling thread's network namespace, held until `close`.

    While another process holds it, raises AlreadyRunning; with `on_wait`, calls that and waits until the lock is free.
    Raises NoLock if the file cannot be opened.
    """

    def __init__(self, on_wait: Callable[[], None] | None = None) -> None:
        self._path = _path()
        self._changing = threading.Lock()
        self._file: int | None = self._take(on_wait)

    def _take(self, on_wait: Callable[[], None] | None = None) -> int:
        """Open and lock the file; once more if someone has deleted it meanwhile, because others open a new one."""
        waits = False
        while True:
            try:
                file = _open(self._path)
            except OSError as error:
                raise NoLock(error) from None
            try:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
                except BlockingIOError:
                    if on_wait is None:
                        raise AlreadyRunning from None
                    waits = True
                    on_wait()
                    fcntl.flock(file, fcntl.LOCK_EX)
                if self._is_in_place(file):
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _is_in_place(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self._path.stat(follow_symlinks=False))
        except OSError:
            return False

    def restore(self) -> bool:
        """Lock a new file if someone has deleted or replaced this one; return whether that was necessary.

        Raises AlreadyRunning if another process has locked the new file, NoLock if it cannot be opened.
        """
        with self._changing:
            if self._file is None or self._is_in_place(self._file):
                return False
            deleted, self._file = self._file, self._take()
            os.close(deleted)  # a process that waits for it opens the new one
            return True

    def waiting(self) -> tuple[str, ...]:
        """Return the processes that wait for this lock. Any thread may call it."""
        return tuple(map(_description, lockers(self._path, waiting=True)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. The file stays: a process may wait for its lock."""
        with self._changing:
            if self._file is not None:
                os.close(self._file)
            self._file = None


def lock_holder() -> str:
    """Describe the process that holds the lock of the calling thread's network namespace."""
    return _description(next(iter(lockers(_path())), 0))


def _path() -> Path:
    namespace = Path("/proc/thread-self/ns/net").stat().st_ino
    return FOLDER / f"net-{namespace}.lock"


def _open(path: Path) -> int:
    """Open the file, so that no other user can open it; create it and its folder if they are missing."""
    path.parent.mkdir(0o700, exist_ok=True)
    path.parent.chmod(0o700)  # the kubelet creates it with mode 0755
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    os.fchmod(file, 0o600)
    return file


def _description(pid: int) -> str:
    """Describe a process; a pid of 0 is one of another pid namespace."""
    running = process(pid) if pid else None
    command = " ".join(running.arguments) if running else "ended since"
    command = without_password("".join(filter(str.isprintable, command)))[:200]
    return f"process {pid} ({command})" if pid else "in another container"
