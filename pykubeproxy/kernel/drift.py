"""Word of what others write into the tables that we use: at once on nft, twice a second on legacy.

What we write ourselves goes through a `Watched` and is no news.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from pykubeproxy.kernel.drift_legacy import LegacyWatch
from pykubeproxy.kernel.drift_nft import NftWatch
from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.foreign import ExternalWrite, TableCounts
from pykubeproxy.kernel.iptables import Tables
from pykubeproxy.kernel.tools import Backend
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey, Ruleset


class DriftWatch(Protocol):
    """Listens from the moment it is made, in the network namespace of the thread that made it."""

    name: str

    def started(self, process: int) -> None:
        """A command of ours runs in this process."""

    def writing(self, family: Family, text: Iterable[str]) -> AbstractContextManager[Iterable[str]]:
        """What the processes named to `started` write meanwhile is ours: this text, taken from what is given.

        Entering and leaving raise OSError where the kernel does not answer.
        """

    def settled(self, family: Family, held: TableCounts) -> None:
        """All that was to be written is, and that is what the tables hold."""

    def run(self) -> None:
        """Tell of what others do, for ever."""


def watch_tables(backend: Backend, heard: Callable[[ExternalWrite], None]) -> DriftWatch:
    """A watch for the tables mangle, filter and nat; `heard` is called from several threads, one at a time.

    Raises OSError where the kernel does not give one.
    """
    return NftWatch(heard) if backend is Backend.NFT else LegacyWatch(heard)


class Watched(msgspec.Struct, frozen=True):
    """Tables whose watch is told what is written by us."""

    tables: Tables
    watch: DriftWatch

    @property
    def backend(self) -> Backend:
        """Where the rules live."""
        return self.tables.backend

    @property
    def family(self) -> Family:
        """IPv4 or IPv6."""
        return self.tables.family

    def save(self, tables: Collection[str] | None = None) -> Ruleset:
        """As `Iptables.save`."""
        return self.tables.save(tables)

    def chains(self, keys: Collection[ChainKey]) -> Ruleset:
        """As `Iptables.chains`."""
        return self.tables.chains(keys)

    def has_chain(self, key: ChainKey) -> bool:
        """As `Iptables.has_chain`."""
        return self.tables.has_chain(key)

    def has_rule(self, key: ChainKey, rule: str) -> bool:
        """As `Iptables.has_rule`."""
        return self.tables.has_rule(key, rule)

    def restore(self, text: str | Iterable[str]) -> None:
        """As `Iptables.restore`; raises KernelError too where the kernel does not answer the watch."""
        try:
            with self.watch.writing(self.family, [text] if isinstance(text, str) else text) as pieces:
                self.tables.restore(pieces)
        except OSError as error:
            reason = error.strerror or str(error)
            raise KernelError(f"the kernel does not tell what others write: {reason}") from error
