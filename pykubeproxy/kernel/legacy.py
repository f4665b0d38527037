"""The legacy tables as python-iptables sees them: a second way to them, which needs no iptables commands.

It crashes under threads, so it is a process of its own:
`python -m pykubeproxy.kernel.legacy IPv4 nat filter` prints the chains of these tables.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pykubeproxy.kernel.errors import Failed, NotPermitted
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey

if TYPE_CHECKING:
    import iptc

# Where the names of the tables that exist are to be read without creating any.
TABLES_FILE = {
    Family.IPV4: Path("/proc/thread-self/net/ip_tables_names"),
    Family.IPV6: Path("/proc/thread-self/net/ip6_tables_names"),
}
_SECONDS = 30
# linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h: IPT_SO_GET_INFO is asked with a table's name of
# 32 bytes, and answers with 84: the name, a bit for each built-in chain, where those begin and end, how many entries
# there are and their size.
_GET_INFO, _NAME_LENGTH = 64, 32
_INFO = struct.Struct("=32sI40sII")
_ASKED_AT = {
    Family.IPV4: (socket.AF_INET, socket.IPPROTO_IP),
    Family.IPV6: (socket.AF_INET6, socket.IPPROTO_IPV6),
}
# linux/prctl.h, linux/capability.h
_PR_CAPBSET_DROP, _CAP_SYS_MODULE = 24, 16
_LIBC = ctypes.CDLL(None, use_errno=True)


def legacy_tables(family: Family) -> tuple[str, ...]:
    """The names of the legacy tables of the calling thread's network namespace, sorted; looking creates none.

    Raises NotPermitted.
    """
    try:
        return tuple(sorted(TABLES_FILE[family].read_text().split()))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise NotPermitted("reading the names of the legacy tables", error.strerror or "") from error


def entries(family: Family, table: str) -> int:
    """How many rules and chains a legacy table has, two for each chain; 0 if there is no such table, or it cannot be seen.

    Takes no more than a moment, however many they are, and creates nothing.
    """
    try:
        return shape(family, table).entries if table in legacy_tables(family) else 0
    except (OSError, NotPermitted):
        return 0


class Shape(NamedTuple):
    """What the kernel tells of a table in a moment: where its built-in chains lie, and how many `entries` it has.

    Those of the table itself, one for each built-in chain and one at its end, do not count.
    """

    raw: bytes
    entries: int


def shape(family: Family, table: str) -> Shape:
    """The shape of a table, which is created if there is none. Raises OSError."""
    domain, level = _ASKED_AT[family]
    answer = ctypes.create_string_buffer(table.encode().ljust(_NAME_LENGTH, b"\0"), _INFO.size)
    length = ctypes.c_uint(_INFO.size)
    with socket.socket(domain, socket.SOCK_DGRAM) as asked:
        if _LIBC.getsockopt(asked.fileno(), level, _GET_INFO, answer, ctypes.byref(length)):
            code = ctypes.get_errno()
            raise OSError(code, f"asking for the size of table {table}: {os.strerror(code)}")
    _, hooks, _, total, _ = _INFO.unpack(answer.raw)
    return Shape(answer.raw, total - hooks.bit_count() - 1)


def legacy_chains(family: Family) -> dict[ChainKey, int]:
    """The chains of the legacy tables that exist, and how many rules each has.

    Raises NotPermitted without CAP_NET_ADMIN and CAP_NET_RAW, Failed if python-iptables cannot be used, TimedOut.
    """
    tables = legacy_tables(family)
    if not tables:
        return {}
    # -P: the folder we happen to be in is no place to look for modules.
    command = (sys.executable, "-P", "-m", "pykubeproxy.kernel.legacy", family.value, *tables)
    outcome = Runner().run(command, seconds=_SECONDS)
    if outcome.exit_code:
        said = (outcome.stderr.strip().splitlines() or [""])[-1]
        if "ermission denied" in said or "permitted" in said or "must be root" in said:
            raise NotPermitted("reading the legacy tables", said, "CAP_NET_ADMIN and CAP_NET_RAW")
        raise Failed("python-iptables", outcome.exit_code, said)
    read = msgspec.json.decode(outcome.stdout, type=dict[str, dict[str, int]])
    return {
        ChainKey(table, chain): rules for table, chains in read.items() for chain, rules in chains.items()
    }


def _main(family: Family, tables: list[str]) -> None:
    # On being imported it runs modprobe, for both families; without this capability that comes to nothing.
    _LIBC.prctl(_PR_CAPBSET_DROP, _CAP_SYS_MODULE, 0, 0, 0)
    import iptc

    kind = iptc.Table if family is Family.IPV4 else iptc.Table6
    # With autocommit it would write a table when it closes it, if it took it for changed.
    read = {name: dict(_chains(kind(name, autocommit=False))) for name in tables}
    sys.stdout.write(msgspec.json.encode(read).decode())


def _chains(table: "iptc.Table") -> Iterator[tuple[str, int]]:
    """The chains of a table and their numbers of rules, which are counted, not decoded."""
    for chain in table.chains:
        count, rule = 0, table.first_rule(chain.name)
        while rule:
            count, rule = count + 1, table.next_rule(rule)
        yield chain.name, count


if __name__ == "__main__":
    _main(Family(sys.argv[1]), sys.argv[2:])
