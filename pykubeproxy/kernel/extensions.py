"""Ask the kernel whether it has a match or a target of iptables, without touching any table.

iptables makes the same two requests when it loads an extension. Both need CAP_NET_ADMIN only, let the kernel load a
missing module, and work on the network namespace of the calling thread.
"""

import errno
import struct

from pykubeproxy.kernel import netfilter
from pykubeproxy.kernel.errors import NotPermitted
from pykubeproxy.kernel.legacy import get_xtables_option
from pykubeproxy.kernel.netfilter import ADDRESS_FAMILY
from pykubeproxy.kernel.tools import Backend
from pykubeproxy.objects import Family

# The revisions of matches and targets so far; any of them will do.
_REVISIONS = range(5)

# nft_compat: linux/netfilter/nf_tables_compat.h
_COMPAT_GET = 11 << 8
_NAME, _REVISION, _TYPE = 1, 2, 3

# xtables: struct xt_get_revision is the name in 29 bytes and the revision; options as in ip_tables.h
_XT_REVISION = struct.Struct("29sB")
_XT_MATCH = {Family.IPV4: 66, Family.IPV6: 68}
_XT_TARGET = {Family.IPV4: 67, Family.IPV6: 69}

# What the kernel answers for an unknown revision, extension or family.
_UNSUPPORTED = {errno.EPROTONOSUPPORT, errno.ENOENT, errno.ENOPROTOOPT, errno.EINVAL}
_UNSUPPORTED |= {errno.EOPNOTSUPP, errno.EAFNOSUPPORT}


def kernel_has(backend: Backend, family: Family, name: str, *, target: bool = False) -> bool:
    """Return whether the kernel has a match (or target) in any revision. Raise NotPermitted."""
    request = _request_nft if backend is Backend.NFT else _request_legacy
    for revision in _REVISIONS:
        try:
            request(family, name, revision, target)
        except PermissionError as error:
            reason = error.strerror or str(error)
            raise NotPermitted(f"cannot ask the kernel whether it has {name}", reason) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return True
    return False


def _request_nft(family: Family, name: str, revision: int, target: bool) -> None:
    body = netfilter.string_attribute(_NAME, name)
    body += netfilter.attribute(_REVISION, struct.pack(">I", revision))
    body += netfilter.attribute(_TYPE, struct.pack(">I", target))
    netfilter.request(_COMPAT_GET, 0, ADDRESS_FAMILY[family], body)


def _request_legacy(family: Family, name: str, revision: int, target: bool) -> None:
    option = (_XT_TARGET if target else _XT_MATCH)[family]
    get_xtables_option(family, option, _XT_REVISION.pack(name.encode(), revision))
