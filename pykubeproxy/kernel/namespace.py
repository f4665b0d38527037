"""A network namespace for a short trial, which nothing outside of it notices."""

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from pykubeproxy.kernel.errors import NotPermitted

_CLONE_NEWNET = 0x40000000
_T = TypeVar("_T")


def in_namespace_of_its_own(work: Callable[[], _T]) -> _T:
    """What `work` returns, called in a thread whose network namespace is new and ends with it.

    Commands that it starts are in that namespace too. What it raises passes through. Raises NotPermitted without
    CAP_SYS_ADMIN, or where namespaces are not allowed.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _leave()
            results.append(work())
        except BaseException as error:
            errors.append(error)

    # The namespace is that of a thread: it lasts as long as the thread and what the thread has started.
    thread = threading.Thread(target=run, name="trial", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _leave() -> None:
    """Put the calling thread into a new network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        reason = os.strerror(number)
        if number in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL):
            raise NotPermitted("making a network namespace", reason, "CAP_SYS_ADMIN")
        raise OSError(number, reason)
