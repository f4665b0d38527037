"""Remember the last syncs and repairs, and the state of each family after its last sync."""

from collections.abc import Mapping

import msgspec

from pykubeproxy.agent.observe.health import HealthState
from pykubeproxy.agent.observe.status import FamilyStatus, Repair, Sync
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.objects import Family

_SYNCS, _REPAIRS = 50, 10


class SyncHistory:
    """Remember the last syncs and repairs, oldest first, with times in seconds since 1970.

    Call from the loop thread only; any thread may read: values are replaced, never changed.
    """

    def __init__(self) -> None:
        self.syncs: tuple[Sync, ...] = ()
        self.repairs: tuple[Repair, ...] = ()
        self._last: Mapping[Family, FamilyStatus] = {}

    def sync_succeeded(self, report: SyncReport, now: float) -> None:
        family, seconds = report.family.value, sum(report.seconds.values())
        self._add(Sync(now, family, report.full, seconds, sum(report.rules_written.values())))
        # Keep a summary: the report refers to every Service of the sync.
        status = FamilyStatus(
            family=family,
            overdue=False,
            services=report.services,
            endpoints=report.endpoints,
            rules=report.rules,
            quarantined=report.quarantined,
            rejected_tree=report.rejected_tree,
        )
        self._last = {**self._last, report.family: status}

    def sync_failed(self, family: Family, full: bool, seconds: float, now: float, reason: str) -> None:
        self._add(Sync(now, family.value, full, seconds, failure=reason))

    def drift_repaired(self, repair: Repair) -> None:
        self.repairs = (*self.repairs, repair)[-_REPAIRS:]

    def families(self, health: HealthState) -> tuple[FamilyStatus, ...]:
        """Return the status of each family in `health`, as of its last successful sync."""
        last = self._last
        return tuple(
            msgspec.structs.replace(
                last.get(family) or FamilyStatus(family=family.value, overdue=False),
                overdue=state.overdue,
                contested=state.contested,
                last_updated=state.last_updated / 1e9 or None,
            )
            for family, state in health.families.items()
        )

    def _add(self, sync: Sync) -> None:
        self.syncs = (*self.syncs, sync)[-_SYNCS:]
