"""Write chunks of a plan: render each while iptables-restore reads the previous one, and record what is in force then."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from pykubeproxy.kernel import KernelError, Rejected, Tables
from pykubeproxy.rules.drift import Drift, DriftCounter, TableDrift
from pykubeproxy.rules.known import ChainsDeleted, Fact, KnownTables
from pykubeproxy.rules.plan import Chunk


class SyncFailed(Exception):
    """iptables-restore failed, or rejected something else on every attempt.

    `facts` would hold if the block with the rejected line were in force; if that is not known, they are those of all
    blocks.
    """

    def __init__(self, error: KernelError, facts: Collection[Fact] = ()) -> None:
        super().__init__(str(error))
        self.error = error
        self.facts = facts


class Written:
    """Count the written chains and rules, and the repaired drift. `ensured` are the lines written to chains of others."""

    def __init__(self, drift: Drift | None, ensured: Mapping[str, tuple[str, ...]]) -> None:
        self.ensured = dict(ensured)
        self.anything = False
        self.chains = self.deleted = 0
        self.rules: Counter[str] = Counter()
        self._drift = DriftCounter(drift, self.ensured) if drift else None

    def add(self, chunk: Chunk) -> None:
        """Count a chunk that was written."""
        self.anything = self.anything or bool(chunk.text)
        self.chains += len(chunk.chains)
        self.deleted += sum(len(fact.chains) for fact in chunk.facts if isinstance(fact, ChainsDeleted))
        for chain in chunk.chains:
            self.rules[chain.key.table] += len(chain.rules)
        if self._drift:
            self._drift.add(chunk.chains)

    def drift(self) -> tuple[TableDrift, ...]:
        """Return the repaired drift by table."""
        return self._drift.report() if self._drift else ()


def write_chunks(
    tables: Tables,
    chunks: Iterable[Chunk],
    known: KnownTables,
    written: Callable[[Chunk], None] = lambda _: None,
    seconds: float | None = None,
) -> float:
    """Write chunks with iptables-restore, and record in `known` what is in force, also after a failure.

    Returns for how many seconds the command was waited for. `seconds` limits the time in which it makes no progress. Calls
    `written` after each chunk. Raises SyncFailed.
    """
    blocks = _Blocks()
    waited = 0.0
    try:
        with tables.session(seconds) as session:
            for chunk in chunks:
                blocks.add(chunk)  # before: the command may end while it reads
                begun = time.monotonic()
                session.write(chunk.text)
                waited += time.monotonic() - begun
                written(chunk)
            begun = time.monotonic()
        waited += time.monotonic() - begun
    except Rejected as rejection:
        known.commit(blocks.before(rejection.line_number))
        known.broke_off()
        raise SyncFailed(rejection, blocks.at(rejection.line_number)) from rejection
    except BaseException as error:  # the command may have ended anywhere
        known.doubt(blocks.all())
        known.broke_off()
        if isinstance(error, KernelError):
            raise SyncFailed(error, blocks.all()) from error
        raise
    known.commit(blocks.all())
    return waited


class _Blocks:
    """What the written blocks do, each with the number of its last line."""

    def __init__(self) -> None:
        self._facts: list[tuple[int, list[Fact]]] = []
        self._lines = 0
        self._is_open = False

    def add(self, chunk: Chunk) -> None:
        """Add a chunk: a block or a part of one. One without text belongs to the block before."""
        self._lines += chunk.text.count("\n")
        if self._facts and (self._is_open or not chunk.text):
            self._facts[-1][1].extend(chunk.facts)
            self._facts[-1] = (self._lines, self._facts[-1][1])
        else:
            self._facts.append((self._lines, [*chunk.facts]))
        self._is_open = bool(chunk.text or self._is_open) and not chunk.text.endswith("COMMIT\n")

    def all(self) -> list[Fact]:
        """Return what all blocks do."""
        return [fact for _, facts in self._facts for fact in facts]

    def before(self, line: int) -> list[Fact]:
        """Return what the blocks do that end before a line, numbered from 1."""
        return [fact for last, facts in self._facts if last < line for fact in facts]

    def at(self, line: int) -> list[Fact]:
        """Return what the block with this line does."""
        return next((facts for last, facts in self._facts if line <= last), [])
