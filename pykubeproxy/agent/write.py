"""Write one update: render each chunk while iptables-restore reads the previous one."""

from collections import Counter
from collections.abc import Callable, Mapping

from pykubeproxy.agent.bisect import owner_of_line
from pykubeproxy.kernel import KernelError, Rejected, Tables
from pykubeproxy.rules.applied import Update
from pykubeproxy.rules.blocks import Blocks, Chunk
from pykubeproxy.rules.digests import AppliedPort, DesiredPort
from pykubeproxy.rules.drift import Drift, DriftCounter, TableDrift
from pykubeproxy.rules.ruleset import ChainKey


class SyncFailed(Exception):
    """iptables-restore failed.

    `service` is the service port whose rule it rejected, as `namespace/name:port`; "" if that is not known.
    """

    def __init__(self, error: KernelError, service: str = "") -> None:
        super().__init__(f"{error} (a rule of service {service})" if service else str(error))
        self.error = error
        self.service = service


class Written:
    """Count written chains and rules, and collect ports and deleted chains for the applied state."""

    def __init__(self, drift: Drift | None, ensured: Mapping[str, tuple[str, ...]]) -> None:
        self.anything = False
        self.chains = 0
        self.deleted: list[ChainKey] = []
        self.rules: Counter[str] = Counter()
        self.ports: list[AppliedPort] = []
        self._drift = DriftCounter(drift, ensured) if drift else None

    def add(self, chunk: Chunk) -> None:
        """Count a chunk that was written."""
        self.anything = self.anything or bool(chunk.text)
        self.chains += len(chunk.chains)
        self.deleted += chunk.deleted
        for chain in chunk.chains:
            self.rules[chain.key.table] += len(chain.rules)
        self.ports += chunk.ports
        if self._drift:
            self._drift.add(chunk.chains)

    def include(self, earlier: "Written") -> None:
        """Count what was written before, too."""
        self.anything = self.anything or earlier.anything
        self.chains += earlier.chains
        self.rules.update(earlier.rules)

    def drift(self) -> tuple[TableDrift, ...]:
        """Return the repaired drift by table."""
        return self._drift.report() if self._drift else ()


def write_update(
    tables: Tables,
    update: Update,
    chains_per_block: int | None,
    drift: Drift | None,
    progress: Callable[[], None] = lambda: None,
    earlier: KernelError | None = None,
) -> Written:
    """Write an update in blocks of about `chains_per_block` chains; `drift` is what it repairs. Raises SyncFailed.

    Calls `progress` after each chunk. An `earlier` failure to write some of it counts like one here.
    """
    written = Written(drift, update.desired.ensured)
    try:
        if earlier:
            raise earlier
        with tables.session() as session:
            for chunk in Blocks(update, chains_per_block):
                session.write(chunk.text)
                written.add(chunk)
                progress()
    except KernelError as error:
        ports = (port for ports in update.desired.services.values() for port in ports)
        rules = {port.name: port.rules for port in ports if isinstance(port, DesiredPort)}
        service = owner_of_line(error.line, rules) if isinstance(error, Rejected) else ""
        raise SyncFailed(error, service) from error
    return written
