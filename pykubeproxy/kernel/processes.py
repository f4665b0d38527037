"""Find the processes and TCP listeners of the calling thread's network namespace, and processes that lock a file."""

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from pykubeproxy.kernel import system

_PROC = Path("/proc")
_TCP_LISTEN = "0A"  # include/net/tcp_states.h
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Process(msgspec.Struct, frozen=True, order=True):
    """A process id and its command line."""

    pid: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the program's name, such as "kube-proxy"; "" for a kernel thread."""
        return self.arguments[0].rpartition("/")[2] if self.arguments else ""


class Listener(msgspec.Struct, frozen=True, order=True):
    """A TCP port and the process that listens on it, None if it is in another pid namespace."""

    port: int
    process: Process | None


def listeners(ports: Collection[int]) -> tuple[Listener, ...]:
    """Return the listeners on these TCP ports, on any address, sorted."""
    sockets = {inode: port for inode, port in _listening() if port in ports}
    pids = {inode: pid for pid, inode in _open_sockets() if inode in sockets} if sockets else {}
    listening = {
        Listener(port, process(pids[inode]) if inode in pids else None) for inode, port in sockets.items()
    }
    return tuple(
        sorted(
            listening, key=lambda listener: (listener.port, listener.process.pid if listener.process else 0)
        )
    )


def namespace_processes() -> tuple[Process, ...]:
    """Return the visible processes of this network namespace, sorted by pid."""
    here = _link(_PROC / "thread-self/ns/net")
    visible = (process(pid) for pid in _pids() if _link(_PROC / str(pid) / "ns/net") == here)
    return tuple(sorted(running for running in visible if running is not None and running.arguments))


def shares_container(other: Process) -> bool:
    """Return whether a process has the same file system as this one, as in one container; False if unknown."""
    return _link(_PROC / str(other.pid) / "ns/mnt") == _link(_PROC / "thread-self/ns/mnt") != ""


def capabilities(other: Process) -> frozenset[str] | None:
    """Return which of CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN a process has; None if it has ended."""
    try:
        return system.capabilities(_PROC / str(other.pid) / "status")
    except OSError:
        return None


def lockers(file: Path, waiting: bool = False, locks: Path = _PROC / "locks") -> tuple[int, ...]:
    """Return the processes that lock a file with flock, or wait for that; 0 for one of another pid namespace.

    The kernel does not show a holder of another pid namespace. A line of /proc/locks:
    `1: FLOCK  ADVISORY  WRITE 5518 fe:00:2146497 0 EOF`; `1: -> FLOCK …` waits.
    """
    try:
        status = file.stat()
        entries = [line.split()[1:] for line in locks.read_text().splitlines()]
    except OSError:
        return ()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    words = [entry[1:] if waiting else entry for entry in entries if (entry[:1] == ["->"]) is waiting]
    return tuple(int(it[3]) for it in words if len(it) > 4 and it[0] == "FLOCK" and it[4] == place)


def process(pid: int) -> Process | None:
    """Return the process with a pid, None if it has ended."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    return Process(pid, tuple(word for word in raw.decode("utf-8", "replace").split("\0") if word))


def _listening() -> Iterator[tuple[str, int]]:
    """Yield the inode and the port of each listening TCP socket."""
    for name in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "thread-self/net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if words[3] == _TCP_LISTEN:
                yield words[9], int(words[1].rpartition(":")[2], 16)


def _open_sockets() -> Iterator[tuple[int, str]]:
    """Yield the pid and the inode of each socket that a visible process has open."""
    for pid in _pids():
        try:
            files = list((_PROC / str(pid) / "fd").iterdir())
        except OSError:
            continue
        for file in files:
            if match := _SOCKET.fullmatch(_link(file)):
                yield pid, match[1]


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
