"""Read and change kernel settings, and the capabilities, memory and network namespace of this process."""

import contextlib
import ctypes
import errno
import os
import re
import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from pykubeproxy.kernel.errors import KernelError, NotPermitted

LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
# linux/capability.h
_CAPABILITY_BITS = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_ADMIN": 21}
_MOST_OPEN_FILES = 1 << 16
_SYSCTLS = Path("/proc/sys")
_T = TypeVar("_T")


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
            if LIBC.unshare(_CLONE_NEWNET):
                raise _namespace_error(libc_error())
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="namespace", daemon=True).start()
    return result.result()


def libc_error() -> OSError:
    """Return the error of the last call of LIBC."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _namespace_error(error: OSError) -> Exception:
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL):
        return NotPermitted("cannot create a network namespace", error.strerror or "", "CAP_SYS_ADMIN")
    return error
