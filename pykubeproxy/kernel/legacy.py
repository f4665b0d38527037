"""Read the legacy tables without iptables commands: their sizes by getsockopt, their chains by python-iptables.

python-iptables crashes under threads, so it runs in a separate process:
`python -m pykubeproxy.kernel.legacy IPv4 nat filter` prints the chains of these tables.
"""

import ctypes
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pykubeproxy.kernel.errors import Failed, NotPermitted
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.kernel.system import LIBC, libc_error
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey

if TYPE_CHECKING:
    import iptc

# The names of the existing tables; iptables commands would create missing ones.
TABLES_FILE = {
    Family.IPV4: Path("/proc/thread-self/net/ip_tables_names"),
    Family.IPV6: Path("/proc/thread-self/net/ip6_tables_names"),
}
_SECONDS = 30
# linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h: IPT_SO_GET_INFO takes a table name of 32 bytes and
# returns 84: the name, a bit for each built-in chain, their offsets, the number of entries, their size.
_GET_INFO = 64
_INFO = struct.Struct("=32sI40sII")
_LEVEL = {Family.IPV4: socket.IPPROTO_IP, Family.IPV6: socket.IPPROTO_IPV6}
# linux/prctl.h, linux/capability.h
_PR_CAPBSET_DROP, _CAP_SYS_MODULE = 24, 16


class Shape(NamedTuple):
    """The layout of a legacy table, and how many `entries` its chains hold, without those of the table itself."""

    raw: bytes
    entries: int


def legacy_tables(family: Family) -> tuple[str, ...]:
    """Return the legacy tables of this network namespace, sorted, and create none. Raises NotPermitted."""
    try:
        return tuple(sorted(TABLES_FILE[family].read_text().split()))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise NotPermitted("cannot read the names of the legacy tables", error.strerror or "") from error


def entries(family: Family, table: str) -> int:
    """Return how many entries a legacy table has: one for a rule, two for a chain; 0 if it is missing or unreadable.

    Takes 50 microseconds at any size and creates nothing.
    """
    try:
        return shape(family, table).entries if table in legacy_tables(family) else 0
    except (OSError, NotPermitted):
        return 0


def shape(family: Family, table: str) -> Shape:
    """Return the shape of a table. The kernel creates a missing table. Raises OSError."""
    raw = get_xtables_option(family, _GET_INFO, table.encode().ljust(_INFO.size, b"\0"))
    _, hooks, _, total, _ = _INFO.unpack(raw)
    # The table itself has an entry for each built-in chain, and one at its end.
    return Shape(raw, total - hooks.bit_count() - 1)


def get_xtables_option(family: Family, option: int, request: bytes) -> bytes:
    """Return the answer of getsockopt to a request; both have the same length. Raises OSError."""
    # Python's getsockopt cannot pass a request. A UDP socket needs no CAP_NET_RAW, unlike the raw socket of iptables.
    buffer = ctypes.create_string_buffer(request, len(request))
    length = ctypes.c_uint(len(request))
    with socket.socket(ADDRESS_FAMILY[family], socket.SOCK_DGRAM) as xtables:
        if LIBC.getsockopt(xtables.fileno(), _LEVEL[family], option, buffer, ctypes.byref(length)):
            raise libc_error()
    return buffer.raw


def legacy_chains(family: Family) -> dict[ChainKey, int]:
    """Return the number of rules of each chain of the legacy tables. Creates no table.

    Raises NotPermitted without CAP_NET_ADMIN and CAP_NET_RAW, Failed if python-iptables fails, TimedOut.
    """
    tables = legacy_tables(family)
    if not tables:
        return {}
    # -P: import nothing from the working directory.
    command = (sys.executable, "-P", "-m", "pykubeproxy.kernel.legacy", family.value, *tables)
    outcome = Runner().run(command, seconds=_SECONDS)
    if outcome.exit_code:
        message = (outcome.stderr.strip().splitlines() or [""])[-1]
        if any(text in message for text in ("ermission denied", "permitted", "must be root")):
            raise NotPermitted("cannot read the legacy tables", message, "CAP_NET_ADMIN and CAP_NET_RAW")
        raise Failed("python-iptables", outcome.exit_code, message)
    tables_read = msgspec.json.decode(outcome.stdout, type=dict[str, dict[str, int]])
    return {
        ChainKey(table, chain): rules
        for table, chains in tables_read.items()
        for chain, rules in chains.items()
    }


def _main(family: Family, tables: list[str]) -> None:
    # Importing iptc runs modprobe for both families; without this capability it fails.
    LIBC.prctl(_PR_CAPBSET_DROP, _CAP_SYS_MODULE, 0, 0, 0)
    import iptc

    kind = iptc.Table if family is Family.IPV4 else iptc.Table6
    # With autocommit, closing a table could write it.
    chains = {name: dict(_chains(kind(name, autocommit=False))) for name in tables}
    sys.stdout.write(msgspec.json.encode(chains).decode())


def _chains(table: "iptc.Table") -> Iterator[tuple[str, int]]:
    """Yield each chain of a table and its number of rules, without decoding them."""
    for chain in table.chains:
        count, rule = 0, table.first_rule(chain.name)
        while rule:
            count, rule = count + 1, table.next_rule(rule)
        yield chain.name, count


if __name__ == "__main__":
    _main(Family(sys.argv[1]), sys.argv[2:])
