"""The processes of this network namespace, so far as they can be seen: who listens where, and who runs at all."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

_PROC = Path("/proc")
_LISTENS = "0A"  # include/net/tcp_states.h
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Process(msgspec.Struct, frozen=True, order=True):
    """A process: its number, and its command line."""

    pid: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The program's name, such as "kube-proxy"; "" for one of the kernel's own."""
        return self.arguments[0].rpartition("/")[2] if self.arguments else ""


class Listener(msgspec.Struct, frozen=True, order=True):
    """A TCP port that is listened on, and by whom; None if that process is not visible from here."""

    port: int
    process: Process | None


def listeners(ports: Collection[int]) -> tuple[Listener, ...]:
    """Who listens on one of these TCP ports, at whatever address, in the network namespace of the calling thread."""
    sockets = {inode: port for inode, port in _listening() if port in ports}
    holders = {inode: pid for pid, inode in _open_sockets() if inode in sockets} if sockets else {}
    found = {
        Listener(port, process(holders[inode]) if inode in holders else None)
        for inode, port in sockets.items()
    }
    return tuple(sorted(found, key=lambda it: (it.port, it.process.pid if it.process else 0)))


def namespace_processes() -> tuple[Process, ...]:
    """The processes of the network namespace of the calling thread that can be seen, by number."""
    here = _link(_PROC / "thread-self/ns/net")
    found = (process(pid) for pid in _pids() if _link(_PROC / str(pid) / "ns/net") == here)
    return tuple(sorted(it for it in found if it is not None and it.arguments))


def process(pid: int) -> Process | None:
    """What runs under a number; None if nothing does any more."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    return Process(pid, tuple(word for word in raw.decode("utf-8", "replace").split("\0") if word))


def _listening() -> Iterator[tuple[str, int]]:
    """The sockets, by inode, that listen on a TCP port."""
    for name in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "thread-self/net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if words[3] == _LISTENS:
                yield words[9], int(words[1].rpartition(":")[2], 16)


def _open_sockets() -> Iterator[tuple[int, str]]:
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
