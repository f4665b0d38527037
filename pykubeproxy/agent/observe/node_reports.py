"""Report what concerns the whole node: drift, rejected trees, skipped objects; in the log, and as Kubernetes Events."""

import structlog

from pykubeproxy.agent.notices import DriftCalm, DriftRepaired, EventApplied, Notice, SyncReport
from pykubeproxy.agent.observe.events import NORMAL, WARNING, KubernetesEvent, Recorder
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind

log = structlog.get_logger()


class NodeReporter:
    """Report, once each, what concerns all Services of this node. Call from the loop thread only."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._contested: set[Family] = set()
        self._rejected_trees: set[Family] = set()

    def notice(self, notice: Notice) -> None:
        """Report what is new."""
        match notice:
            case EventApplied(event):
                self._applied(event)
            case SyncReport():
                self._follow_tree(notice)
            case DriftRepaired():
                self._repaired(notice)
            case DriftCalm(family) if family in self._contested:
                self._contested.discard(family)
                log.info("drift no longer contested", family=family.value)
                note = f"no other program undoes {self._rules_of(family)} any more"
                self._recorder.on_node("DriftCalm", note, type_=NORMAL)

    def _applied(self, event: Event) -> None:
        node_name = self._recorder.node_name
        if event == Deleted(Kind.NODE, Key("", node_name)):
            log.warning("node deleted, serving with its last state", about=event.key, node=node_name)
        if isinstance(event, Deleted) and event.too_large:
            kind = event.kind.value
            note = f"node {node_name} skips {kind} {event.key}: {event.too_large}"
            self._recorder.record(KubernetesEvent(kind, event.key, WARNING, "ObjectSkipped", "Watch", note))

    def _follow_tree(self, report: SyncReport) -> None:
        """Log when iptables begins to reject a dispatch tree, and when it accepts the tree again."""
        family, reason = report.family, report.rejected_tree
        if reason and family not in self._rejected_trees:
            self._rejected_trees.add(family)
            log.warning("dispatch tree rejected, using a flat chain", family=family.value, reason=reason)
        elif not reason and family in self._rejected_trees:
            self._rejected_trees.discard(family)
            log.info("dispatch tree accepted again", family=family.value)

    def _repaired(self, repaired: DriftRepaired) -> None:
        family, rules = repaired.family, self._rules_of(repaired.family)
        tables = {drift.table: str(drift) for drift in repaired.drift}
        writers = ", ".join(repaired.writers)
        log.warning(
            "drift repaired",
            family=family.value,
            **tables,
            writers=writers or "unknown",
            seconds=round(repaired.seconds, 3),
        )
        if repaired.contested:
            log.error("drift contested, backing off", family=family.value)
            if family not in self._contested:
                note = f"another program keeps undoing {rules}; pykubeproxy waits longer before each repair"
                self._recorder.on_node("DriftContested", note)
            self._contested.add(family)
        else:
            self._contested.discard(family)
        drift = "; ".join(map(": ".join, tables.items()))
        note = f"{writers or 'another program'} changed {rules}; pykubeproxy repaired them: {drift}"
        self._recorder.on_node("DriftRepaired", note)

    def _rules_of(self, family: Family) -> str:
        return f"{family.value} rules of node {self._recorder.node_name}"
