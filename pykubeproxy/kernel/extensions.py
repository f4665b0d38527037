"""Asking the kernel whether it has a match or a target of iptables, without touching any table.

The tools ask the same two questions when they load an extension. CAP_NET_ADMIN is enough for both, and the
kernel loads a missing module if it may. Both work on the network namespace of the calling thread.
"""

import ctypes
import errno
import os
import socket
import struct

from pykubeproxy.kernel import netfilter
from pykubeproxy.kernel.domain import DOMAIN
from pykubeproxy.kernel.tools import Backend
from pykubeproxy.objects import Family

# Revisions that matches and targets have had so far; having any of them is having the extension.
_REVISIONS = range(5)

# nft_compat: linux/netfilter/nf_tables_compat.h
_COMPAT_GET = 11 << 8
_NAME, _REVISION, _TYPE = 1, 2, 3

# xtables: struct xt_get_revision is the name in 29 bytes and the revision; options as in ip_tables.h
_XT_REVISION = struct.Struct("29sB")
_XT_LEVEL = {Family.IPV4: socket.IPPROTO_IP, Family.IPV6: socket.IPPROTO_IPV6}
_XT_MATCH = {Family.IPV4: 66, Family.IPV6: 68}
_XT_TARGET = {Family.IPV4: 67, Family.IPV6: 69}

# The kernel's ways of saying that it has no such thing: not this revision, not this extension, no interface.
_NOT_THERE = {
    errno.EPROTONOSUPPORT,
    errno.ENOENT,
    errno.ENOPROTOOPT,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EAFNOSUPPORT,
}


def kernel_has(backend: Backend, family: Family, name: str, *, target: bool = False) -> bool:
    """Whether the kernel has the match (or target) for this family in this backend, in any revision.

    Raises PermissionError without CAP_NET_ADMIN.
    """
    question = _ask_nft if backend is Backend.NFT else _ask_legacy
    for revision in _REVISIONS:
        try:
            question(family, name, revision, target)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
        else:
            return True
    return False


def _ask_nft(family: Family, name: str, revision: int, target: bool) -> None:
    body = netfilter.attribute(_NAME, name.encode() + b"\0")
    body += netfilter.attribute(_REVISION, struct.pack(">I", revision))
    body += netfilter.attribute(_TYPE, struct.pack(">I", target))
    netfilter.ask(_COMPAT_GET, 0, DOMAIN[family], body)


def _ask_legacy(family: Family, name: str, revision: int, target: bool) -> None:
    # Python's own getsockopt cannot hand the kernel a question. A UDP socket will do where iptables uses a
    # raw one, which would need CAP_NET_RAW.
    question = ctypes.create_string_buffer(_XT_REVISION.pack(name.encode(), revision), _XT_REVISION.size)
    size = ctypes.c_uint32(_XT_REVISION.size)
    option = (_XT_TARGET if target else _XT_MATCH)[family]
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(DOMAIN[family], socket.SOCK_DGRAM) as asked:
        if libc.getsockopt(asked.fileno(), _XT_LEVEL[family], option, question, ctypes.byref(size)) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
