"""Create and read the kernel's named packet counters, which rules with `-m nfacct` increment.

iptables rejects a rule that names a missing counter. Each network namespace has its own counters. pyroute2 has no messages
for them.
"""

import errno

from pykubeproxy.kernel import netlink
from pykubeproxy.rules.ruleset import Count

# linux/netfilter/nfnetlink_acct.h
_NEW, _GET = 7 << 8, 7 << 8 | 1
_NAME, _PACKETS, _BYTES = 1, 2, 3


def ensure(name: str) -> str:
    """Create a counter; an existing one keeps its count. Return why that failed, "" if it succeeded.

    Names have up to 31 bytes.
    """
    flags = netlink.ACK | netlink.CREATE | netlink.EXCLUSIVE
    try:
        netlink.netfilter_request(_NEW, flags, 0, netlink.string_attribute(_NAME, name))
    except FileExistsError:
        pass
    except OSError as error:
        permitted = error.errno != errno.EPERM
        advice = "load the kernel module nfnetlink_acct" if permitted else "run as root or with CAP_NET_ADMIN"
        return f"cannot create the nfacct counter {name}: {error.strerror}; {advice}"
    return ""


def read(name: str) -> Count | None:
    """Return the value of a counter, None if there is none or it cannot be read."""
    try:
        answer = netlink.attributes(
            netlink.netfilter_request(_GET, 0, 0, netlink.string_attribute(_NAME, name))
        )
        return Count(*(int.from_bytes(answer[kind], "big") for kind in (_PACKETS, _BYTES)))
    except (OSError, KeyError):
        return None
