"""The legacy tables as python-iptables sees them: a second way to them, which needs no iptables commands.

It crashes under threads, so it is a process of its own:
`python -m pykubeproxy.kernel.legacy IPv4 nat filter` prints the chains of these tables.
"""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pykubeproxy.kernel.errors import Failed, NotPermitted
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey

if TYPE_CHECKING:
    import iptc

_NET = Path("/proc/thread-self/net")
_NAMES = {Family.IPV4: "ip_tables_names", Family.IPV6: "ip6_tables_names"}
_SECONDS = 30
# linux/prctl.h, linux/capability.h
_PR_CAPBSET_DROP, _CAP_SYS_MODULE = 24, 16


def legacy_tables(family: Family) -> tuple[str, ...]:
    """The names of the legacy tables of the calling thread's network namespace, sorted; looking creates none.

    Raises NotPermitted.
    """
    try:
        return tuple(sorted((_NET / _NAMES[family]).read_text().split()))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise NotPermitted("reading the names of the legacy tables", error.strerror or "") from error


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
    ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_SYS_MODULE, 0, 0, 0)
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
