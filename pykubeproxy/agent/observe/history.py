"""The last syncs and repairs of the agent, for its status."""

import time
from collections.abc import Mapping

import msgspec

from pykubeproxy.agent.notices import DriftRepaired, Notice, SyncFailure, SyncReport
from pykubeproxy.agent.observe.health import HealthState
from pykubeproxy.objects import Family
from pykubeproxy.pages.statusz import FamilyStatus, RepairRecord, SyncRecord

_SYNCS, _REPAIRS = 50, 10


class SyncHistory:
    """Remember the last syncs and repairs, oldest first, with times in seconds since 1970.

    Call from the loop thread only; any thread may read: values are replaced, never changed.
    """

    def __init__(self) -> None:
        self.syncs: tuple[SyncRecord, ...] = ()
        self.repairs: tuple[RepairRecord, ...] = ()
        self._last: Mapping[Family, FamilyStatus] = {}

    def notice(self, notice: Notice) -> None:
        """Remember a sync or a repair."""
        now = time.time()
        match notice:
            case SyncReport(family=family, full=full):
                seconds, rules = sum(notice.seconds.values()), sum(notice.rules_written.values())
                self._add(SyncRecord(now, family.value, full, seconds, rules))
                self._last = {**self._last, family: _summary(notice)}
            case SyncFailure(family, full, seconds, _, reason):
                self._add(SyncRecord(now, family.value, full, seconds, failure=reason))
            case DriftRepaired(family, drift, writers, seconds):
                repair = RepairRecord(now, family.value, seconds, drift, writers)
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

    def _add(self, sync: SyncRecord) -> None:
        self.syncs = (*self.syncs, sync)[-_SYNCS:]


def _summary(report: SyncReport) -> FamilyStatus:
    """Return what the status shows of a report, which refers to every Service of the sync."""
    return FamilyStatus(
        family=report.family.value,
        overdue=False,
        services=report.services,
        endpoints=report.endpoints,
        rules=report.rules,
        quarantined=report.quarantined,
        rejected_tree=report.rejected_tree,
    )
