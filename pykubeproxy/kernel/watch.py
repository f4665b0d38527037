"""Watch what other programs write to the tables we use: at once on nft, twice a second on legacy.

The agent writes through WatchedTables, so that the watch can tell its writes from those of others.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import msgspec

from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.external_write import ExternalWrite, TableCounts
from pykubeproxy.kernel.iptables import Tables
from pykubeproxy.kernel.restore import RestoreSession
from pykubeproxy.kernel.tools import Backend
from pykubeproxy.kernel.watch_legacy import LegacyWatch
from pykubeproxy.kernel.watch_nft import NftWatch
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey, Ruleset


class TableWatch(Protocol):
    """A watch that starts with its constructor, in the network namespace of the calling thread."""

    name: str

    def command_started(self, process: int) -> None:
        """Record that a command of ours runs in this process."""

    def own_writes(self, family: Family) -> AbstractContextManager[Callable[[str], None]]:
        """Do not report what the processes given to `command_started` write inside this context.

        Yields a function to call with each text before it is written. Entering and leaving raise OSError if the kernel
        does not answer.
        """

    def synced(self, family: Family, counts: TableCounts) -> None:
        """Record that a sync is complete, and how many entries the tables hold now."""

    def run(self) -> None:
        """Report writes of others; never return."""


def watch_tables(backend: Backend, report: Callable[[ExternalWrite], None]) -> TableWatch:
    """Watch the tables mangle, filter and nat; `report` is called from several threads, one at a time.

    Raises OSError if the kernel does not allow it.
    """
    return NftWatch(report) if backend is Backend.NFT else LegacyWatch(report)


class WatchedTables(msgspec.Struct, frozen=True):
    """Tables whose writes are announced to a watch. Reads go to `tables` unchanged."""

    tables: Tables
    watch: TableWatch

    @property
    def backend(self) -> Backend:
        """Return the backend that holds the rules."""
        return self.tables.backend

    @property
    def family(self) -> Family:
        """Return the address family."""
        return self.tables.family

    def save(self, tables: Collection[str] | None = None) -> Ruleset:
        """Read as `Iptables.save` does."""
        return self.tables.save(tables)

    def chains(self, keys: Collection[ChainKey]) -> Ruleset:
        """Read as `Iptables.chains` does."""
        return self.tables.chains(keys)

    def has_chain(self, key: ChainKey) -> bool:
        """Read as `Iptables.has_chain` does."""
        return self.tables.has_chain(key)

    def has_rule(self, key: ChainKey, rule: str) -> bool:
        """Read as `Iptables.has_rule` does."""
        return self.tables.has_rule(key, rule)

    def restore(self, text: str) -> None:
        """Write as `Iptables.restore` does. Raises KernelError too if the kernel does not answer the watch."""
        with self.session() as session:
            session.write(text)

    @contextmanager
    def session(self, seconds: float | None = None) -> Iterator[RestoreSession]:
        """Write as in `Iptables.session`. Raises KernelError too if the kernel does not answer the watch."""
        try:
            with self.watch.own_writes(self.family) as note, self.tables.session(seconds) as session:
                yield _NotedSession(session, note)
        except OSError as error:
            reason = error.strerror or str(error)
            raise KernelError(f"cannot watch the tables while writing to them: {reason}") from error


class _NotedSession(NamedTuple):
    """A session that passes each text to `note` before writing it."""

    session: RestoreSession
    note: Callable[[str], None]

    def write(self, text: str) -> None:
        self.note(text)
        self.session.write(text)
