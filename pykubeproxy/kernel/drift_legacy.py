"""What others write into the tables of iptables-legacy: seen twice a second by the size of a table, in microseconds.

A rule that was replaced by another of the same size is not seen. Only tables that exist are asked for: asking for
another would create it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from pykubeproxy.kernel.foreign import TABLES, ExternalWrite, TableCounts
from pykubeproxy.kernel.legacy import Shape, legacy_tables, shape
from pykubeproxy.objects import Family

_SECONDS = 0.5


class LegacyWatch:
    """Calls `heard` for what others write into tables of iptables-legacy, in `run` or in the thread that is `writing`."""

    name = "drift"

    def __init__(self, heard: Callable[[ExternalWrite], None]) -> None:
        self._heard = heard
        self._lock = threading.Lock()
        # The tables of each family that is written, as they were when they were last looked at.
        self._shapes: dict[Family, dict[str, Shape]] = {}
        # How many entries of others there were.
        self._others: dict[Family, dict[str, int]] = {}

    def started(self, process: int) -> None:
        """A command of ours runs in this process, which does not matter here."""

    @contextlib.contextmanager
    def writing(self, family: Family, text: Iterable[str]) -> Iterator[Iterable[str]]:
        """What changes meanwhile is ours."""
        with self._lock:
            self._compare(family)
            try:
                yield text
            finally:
                there = [table for table in legacy_tables(family) if table in TABLES]
                self._shapes[family] = {table: shape(family, table) for table in there}

    def settled(self, family: Family, held: TableCounts) -> None:
        """All that was to be written is, and that is what the tables hold.

        If the number of all others is not what it should be, somebody wrote when we did not hold the tables' lock.
        """
        with self._lock:
            shapes = self._shapes.get(family, {})
            expected = {**self._others.get(family, {}), **held.others}
            expected = {table: expected.get(table, 0) + held.added.get(table, 0) for table in shapes}
            others = {table: it.entries - held.ours.get(table, 0) for table, it in shapes.items()}
            self._others[family] = others
            if wrong := frozenset(table for table in shapes if others[table] != expected[table]):
                self._heard(ExternalWrite(family, wrong))

    def run(self) -> None:
        """Look, for ever."""
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
            self._heard(ExternalWrite(family, changed))
