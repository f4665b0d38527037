"""Read and change kernel settings; find processes and TCP listeners; change this process and its namespace.

Everything works on the network namespace of the calling thread.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import re
import resource
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec

from pykubeproxy.kernel.errors import KernelError, NotPermitted

LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
# linux/capability.h
_CAPABILITY_BITS = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_ADMIN": 21}
_MOST_OPEN_FILES = 1 << 16
_SYSCTLS = Path("/proc/sys")
_T = TypeVar("_T")
_PROC = Path("/proc")
_TCP_LISTEN = "0A"  # include/net/tcp_states.h
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class SettingError(KernelError):
    """A kernel setting could not be read or written."""

    def __init__(self, action: str, error: OSError) -> None:
        super().__init__(f"cannot {action}: {error.strerror}")
        self.errno = error.errno


def read_setting(name: str, root: Path = _SYSCTLS) -> str | None:
    """Return the value of a setting such as net/ipv4/ip_forward, None if there is none. Raises SettingError."""
    try:
        return (root / name).read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingError(f"read the kernel setting {name}", error) from error


def write_setting(name: str, value: str | int, root: Path = _SYSCTLS) -> None:
    """Set a setting. Raises SettingError if it does not exist, the value is invalid, or permission is missing."""
    try:
        # Opened for update, so that a wrong name creates no file.
        with (root / name).open("r+") as file:
            file.write(str(value))
    except OSError as error:
        raise SettingError(f"set the kernel setting {name} to {value}", error) from error


def routes_loopback(root: Path = _SYSCTLS) -> bool:
    """Return whether packets of other hosts may reach 127.0.0.0/8 on an interface; True if that cannot be read."""
    try:
        settings = [path.read_text().strip() for path in (root / "net/ipv4/conf").glob("*/route_localnet")]
    except OSError:
        return True
    return settings != ["0"] * len(settings)


def capabilities(status: Path = Path("/proc/thread-self/status")) -> frozenset[str]:
    """Return which of CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN are in effect."""
    match = re.search(r"^CapEff:\s*(\w+)", status.read_text(), re.MULTILINE)
    mask = int(match[1], 16) if match else 0
    return frozenset(name for name, bit in _CAPABILITY_BITS.items() if mask & 1 << bit)


def release_memory() -> None:
    """Return unused heap memory to the kernel: after a large job, a tenth of the process. Needs glibc."""
    with contextlib.suppress(AttributeError):
        LIBC.malloc_trim(0)


def raise_open_files() -> int:
    """Raise this process's limit of open files to its hard limit, at most 65536, and return how many it may open.

    Commands inherit the limit. Some programs close all possible descriptors, which takes seconds at a limit of a billion;
    iptables does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # An infinite limit is -1.
    highest = min(hard, _MOST_OPEN_FILES) if hard >= 0 else _MOST_OPEN_FILES
    if 0 <= soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    return highest


def run_in_new_namespace(work: Callable[[], _T]) -> _T:
    """Call `work` in a thread with a new network namespace, which ends with the thread, and return its result.

    Commands that `work` starts share the namespace, and its exceptions pass through. Raises NotPermitted without
    CAP_SYS_ADMIN, or where the kernel forbids namespaces.
    """
    result: Future[_T] = Future()

    def run() -> None:
        try:
            try:
                enter_new_namespace()
            except OSError as error:
                raise _namespace_error(error) from None
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="namespace", daemon=True).start()
    return result.result()


def enter_new_namespace() -> None:
    """Move the calling thread into a new network namespace. Raises OSError."""
    if LIBC.unshare(_CLONE_NEWNET):
        raise libc_error()


def libc_error() -> OSError:
    """Return the error of the last call of LIBC."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _namespace_error(error: OSError) -> Exception:
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL):
        return NotPermitted("cannot create a network namespace", error.strerror or "", "CAP_SYS_ADMIN")
    return error


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


def namespaces_with(address: str) -> tuple[str, ...]:
    """Return paths of the other network namespaces that have this address, one for each, by their visible processes."""
    seen = {_link(_PROC / "thread-self/ns/net")}
    found = []
    for pid in _pids():
        namespace = _link(_PROC / str(pid) / "ns/net")
        if namespace and namespace not in seen:
            seen.add(namespace)
            with contextlib.suppress(OSError):
                if _has_address(_PROC / str(pid) / "net", address):
                    found.append(str(_PROC / str(pid) / "ns/net"))
    return tuple(found)


def _has_address(directory: Path, address: str) -> bool:
    """Return whether the namespace of a /proc/PID/net has an address. Raises OSError."""
    if ":" in address:
        return ipaddress.ip_address(address).packed.hex() in (directory / "if_inet6").read_text().split()
    words = (directory / "fib_trie").read_text().split()
    return any(
        one == address and words[at + 1 : at + 4] == ["/32", "host", "LOCAL"] for at, one in enumerate(words)
    )


def shares_container(other: Process) -> bool:
    """Return whether a process has the same file system as this one, as in one container; False if unknown."""
    return _link(_PROC / str(other.pid) / "ns/mnt") == _link(_PROC / "thread-self/ns/mnt") != ""


def capabilities_of(other: Process) -> frozenset[str] | None:
    """Return which of CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN a process has; None if it has ended."""
    try:
        return capabilities(_PROC / str(other.pid) / "status")
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
    return tuple(
        int(entry[3]) for entry in words if len(entry) > 4 and entry[0] == "FLOCK" and entry[4] == place
    )


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
