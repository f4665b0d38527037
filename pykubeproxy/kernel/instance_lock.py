"""Allow one writer of the tables of a network namespace, with a lock on a file that only root can open.

The kernel releases the lock when the process ends, and wakes up one of those that wait for it.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.processes import lockers, process
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
        try:
            self._file = _open(self._path)
        except OSError as error:
            raise NoLock(error) from None
        try:
            self._take(on_wait)
        except BaseException:
            self.close()
            raise

    def _take(self, on_wait: Callable[[], None] | None) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is None:
                raise AlreadyRunning from None
            on_wait()
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def waiting(self) -> tuple[str, ...]:
        """Return the processes that wait for this lock. Any thread may call it."""
        return tuple(map(_description, lockers(self._path, waiting=True)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. The file stays: a process may wait for its lock."""
        os.close(self._file)


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
