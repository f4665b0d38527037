"""Watch writes of others to the tables of iptables-legacy: compare the shape of each table twice a second.

A comparison takes microseconds, and misses a rule that replaces another of the same size. Only existing tables are read:
reading another one would create it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from pykubeproxy.kernel.external_write import TABLES, ExternalWrite, TableCounts
from pykubeproxy.kernel.legacy import Shape, legacy_tables, shape
from pykubeproxy.objects import Family

_SECONDS = 0.5


class LegacyWatch:
    """Call `report` for writes of others, from the thread in `run` or the one in `own_writes`."""

    name = "drift"

    def __init__(self, report: Callable[[ExternalWrite], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        # The tables of each family that the agent writes, as last read.
        self._shapes: dict[Family, dict[str, Shape]] = {}
        # How many entries foreign chains had then.
        self._others: dict[Family, dict[str, int]] = {}

    def command_started(self, process: int) -> None:
        """Do nothing: the kernel does not report who wrote a table."""

    @contextlib.contextmanager
    def own_writes(self, family: Family) -> Iterator[Callable[[str], None]]:
        """Do not report changes inside this context."""
        with self._lock:
            self._compare(family)
            try:
                yield lambda _: None
            finally:
                existing = [table for table in legacy_tables(family) if table in TABLES]
                self._shapes[family] = {table: shape(family, table) for table in existing}

    def synced(self, family: Family, counts: TableCounts) -> None:
        """Record how many entries the tables hold after a sync.

        An unexpected number of foreign entries means that another program wrote between our own writes.
        """
        with self._lock:
            shapes = self._shapes.get(family, {})
            expected = {**self._others.get(family, {}), **counts.others}
            expected = {table: expected.get(table, 0) + counts.added.get(table, 0) for table in shapes}
            others = {table: size.entries - counts.ours.get(table, 0) for table, size in shapes.items()}
            self._others[family] = others
            if wrong := frozenset(table for table in shapes if others[table] != expected[table]):
                self._report(ExternalWrite(family, wrong))

    def run(self) -> None:
        """Compare twice a second; never return."""
        while True:
            time.sleep(_SECONDS)
            with self._lock:
                for family in [*self._shapes]:
                    self._compare(family)

    def _compare(self, family: Family) -> None:
        known = self._shapes.get(family, {})
        now = {table: shape(family, table) for table in known}
        if changed := frozenset(table for table in known if now[table] != known[table]):
            self._shapes[family] = now
            others = self._others.get(family, {})
            for table in changed & others.keys():
                others[table] += now[table].entries - known[table].entries
            self._report(ExternalWrite(family, changed))
