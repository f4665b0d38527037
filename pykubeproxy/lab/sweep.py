"""Taking a lab away: its processes, its namespaces, its directory, all found by the lab's name.

The same is done by whoever comes first: a lab that ends, `lab down`, or the janitor, a small process that
does nothing but wait for the driver to die, however it dies.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from pykubeproxy.lab.rundir import AlreadyRunning, RunDirectory

NETNS = Path("/run/netns")
PATIENCE = 5.0

Inode = tuple[int, int]


def sweep(lab: str) -> None:
    """End every process in the lab's namespaces, remove them and the lab's directory, as far as there are any."""
    sweep_namespaces(lab)
    RunDirectory(lab).remove()


def sweep_namespaces(lab: str) -> None:
    """End every process in the lab's namespaces and remove them."""
    from pykubeproxy.lab import namespaces

    deadline = time.monotonic() + PATIENCE
    # More than one round: a process may just have been starting another.
    while (found := namespaces.names(lab)) and time.monotonic() < deadline:
        inside = _inodes(found)
        if pids := processes_in(inside):
            for pid in pids:
                _kill(pid, inside)
        else:
            _remove(found)
    _remove(namespaces.names(lab))


def _remove(found: list[str]) -> None:
    from pyroute2 import netns

    for name in found:
        with contextlib.suppress(OSError):  # somebody else sweeps too, or holds it for a moment
            netns.remove(name)


def _inodes(found: list[str]) -> set[Inode]:
    inodes = set()
    for name in found:
        try:
            status = (NETNS / name).stat()
        except FileNotFoundError:
            continue
        inodes.add((status.st_dev, status.st_ino))
    return inodes


def processes_in(namespaces: set[Inode]) -> list[int]:
    """The processes whose network namespace is one of these, this one left out."""
    return [
        pid
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        if pid != os.getpid() and _namespace(pid) in namespaces
    ]


def _namespace(pid: int) -> Inode:
    try:
        status = Path(f"/proc/{pid}/ns/net").stat()
    except OSError:
        return 0, 0  # gone by now
    return status.st_dev, status.st_ino


def _kill(pid: int, namespaces: set[Inode]) -> None:
    """Kill a process of the lab and see it gone; the number may belong to somebody else by now."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _namespace(pid) in namespaces:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], PATIENCE)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def start_janitor(lab: str) -> subprocess.Popen[bytes]:
    """Start the process that sweeps as soon as its standard input ends, which is when its starter ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "pykubeproxy.lab.sweep", lab],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(lab: str) -> None:
    """The janitor."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    directory = RunDirectory(lab)
    try:
        # The kernel may close the driver's end of the pipe a moment before it lets go of the lock.
        directory.lock(patience=2.0)
    except AlreadyRunning:
        return  # a new lab of this name has swept already
    sweep(lab)


if __name__ == "__main__":
    main(sys.argv[1])
