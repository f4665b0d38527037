"""The last syncs, and what the last one of each family found: for people who want to see how it has been going."""

from collections.abc import Mapping

from pykubeproxy.agent.health import State
from pykubeproxy.agent.status import FamilyStatus, Sync
from pykubeproxy.agent.tables import Report
from pykubeproxy.objects import Family

# How many syncs are remembered.
LENGTH = 50


class History:
    """Remembers what it is told. One thread tells, any may read: what it gives out is replaced, never changed."""

    def __init__(self) -> None:
        self.syncs: tuple[Sync, ...] = ()
        """The last ones, the oldest first."""
        self._last: Mapping[Family, Report] = {}

    def synced(self, report: Report, now: float) -> None:
        """A sync has succeeded; `now` in seconds since 1970."""
        seconds = sum(report.seconds.values())
        rules = sum(report.rules_written.values())
        self._add(Sync(now, report.family.value, report.full, seconds, rules))
        # Without the services themselves, which the cluster holds already.
        self._last = {**self._last, report.family: _counts(report)}

    def failed(self, family: Family, full: bool, seconds: float, now: float, why: str) -> None:
        """A sync has failed after `seconds`."""
        self._add(Sync(now, family.value, full, seconds, failure=why))

    def families(self, health: State) -> tuple[FamilyStatus, ...]:
        """Each family that `health` knows, with what its last sync found."""
        last = self._last
        return tuple(
            FamilyStatus(
                family=family.value,
                overdue=state.overdue,
                last_updated=state.last_updated / 1e9 if state.programmed else None,
                services=last[family].services if family in last else 0,
                endpoints=last[family].endpoints if family in last else 0,
                rules=last[family].rules if family in last else {},
            )
            for family, state in health.families.items()
        )

    def _add(self, sync: Sync) -> None:
        self.syncs = (*self.syncs, sync)[-LENGTH:]
