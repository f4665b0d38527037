"""The last syncs, and what the last one of each family found: for people who want to see how it has been going."""

from collections.abc import Mapping

import msgspec

from pykubeproxy.agent.observe.health import State
from pykubeproxy.agent.observe.status import FamilyStatus, QuarantinedStatus, Repair, Sync
from pykubeproxy.agent.quarantine.quarantine import Quarantined
from pykubeproxy.agent.sync.report import Report
from pykubeproxy.objects import Family

# How many syncs are remembered.
LENGTH = 50
_REPAIRS = 10


class History:
    """Remembers what it is told. One thread tells, any may read: what it gives out is replaced, never changed."""

    def __init__(self) -> None:
        self.syncs: tuple[Sync, ...] = ()
        """The last ones, the oldest first."""
        self.repairs: tuple[Repair, ...] = ()
        self._last: Mapping[Family, FamilyStatus] = {}

    def synced(self, report: Report, now: float) -> None:
        """A sync has succeeded; `now` in seconds since 1970."""
        seconds = sum(report.seconds.values())
        rules = sum(report.rules_written.values())
        self._add(Sync(now, report.family.value, report.full, seconds, rules))
        # Not the report itself, for it holds services.
        found = FamilyStatus(
            family=report.family.value,
            overdue=False,
            services=report.services,
            endpoints=report.endpoints,
            rules=report.rules,
            set_aside=tuple(map(_aside, report.aside)),
        )
        self._last = {**self._last, report.family: found}

    def repaired(self, repair: Repair) -> None:
        """What others had done was put right."""
        self.repairs = (*self.repairs, repair)[-_REPAIRS:]

    def failed(self, family: Family, full: bool, seconds: float, now: float, why: str) -> None:
        """A sync has failed after `seconds`."""
        self._add(Sync(now, family.value, full, seconds, failure=why))

    def families(self, health: State) -> tuple[FamilyStatus, ...]:
        """Each family that `health` knows, with what its last sync found."""
        last = self._last
        return tuple(
            msgspec.structs.replace(
                last.get(family) or FamilyStatus(family=family.value, overdue=False),
                overdue=state.overdue,
                contested=state.contested,
                last_updated=state.last_updated / 1e9 if state.programmed else None,
            )
            for family, state in health.families.items()
        )

    def _add(self, sync: Sync) -> None:
        self.syncs = (*self.syncs, sync)[-LENGTH:]


def _aside(aside: Quarantined) -> QuarantinedStatus:
    name = aside.name
    return QuarantinedStatus(
        namespace=name.namespace,
        name=name.service,
        port=name.port,
        protocol=name.protocol,
        why=aside.why,
        since=aside.since,
        refuses=aside.refuses,
    )
