"""Log syncs and changes of endpoints."""

from collections.abc import Mapping

import structlog

from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.objects import Family
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import Reason, ResolvedPort, Verdict

# The verbosity (-v) from which syncs and single endpoints are logged.
SYNCS, ENDPOINTS = 2, 4

log = structlog.get_logger()


class SyncLog:
    """Log each sync, and each endpoint that a sync added, changed or removed. Call from the loop thread only.

    Remember endpoints only if `verbosity` is at least `ENDPOINTS`.
    """

    def __init__(self, verbosity: int) -> None:
        self.verbosity = verbosity
        self._endpoints: dict[tuple[Family, PortName], Mapping[str, str]] = {}
        self._skipped: dict[tuple[Family, PortName], frozenset[tuple[str, str, str]]] = {}

    def synced(self, report: SyncReport) -> None:
        """Log the sync of one family."""
        if self.verbosity >= ENDPOINTS:
            for item in report.resolved:
                states = {verdict.endpoint.target: _state(verdict) for verdict in item.selection.verdicts}
                self._log_endpoints(report.family, item.port.name, states)
                self._log_skipped(report.family, item)
            for name in report.gone:
                self._log_endpoints(report.family, name, {})
                self._skipped.pop((report.family, name), None)
        if self.verbosity >= SYNCS:
            log.info(
                "synced",
                family=report.family.value,
                kind="full" if report.full else "partial",
                services=report.services,
                endpoints=report.endpoints,
                chains_written=report.chains_written,
                chains_deleted=report.chains_deleted,
                rules_written=sum(report.rules_written.values()),
                **{f"{phase}_seconds": round(seconds, 4) for phase, seconds in report.seconds.items()},
            )

    def _log_endpoints(self, family: Family, name: PortName, now: Mapping[str, str]) -> None:
        before = self._endpoints.pop((family, name), {})
        if now:
            self._endpoints[family, name] = now
        service = str(name)
        for target in sorted(before.keys() - now.keys()):
            log.info("endpoint removed", service=service, endpoint=target)
        for target, state in now.items():
            fields = {"service": service, "endpoint": target, "state": state}
            if target not in before:
                log.info("endpoint added", **fields)
            elif before[target] != state:
                log.info("endpoint changed", **fields, was=before[target])

    def _log_skipped(self, family: Family, item: ResolvedPort) -> None:
        """Log entries of EndpointSlices that do not become endpoints of this port."""
        name = item.port.name
        now = frozenset(
            (skipped.slice_name, skipped.address, skipped.reason.value) for skipped in item.skipped
        )
        for slice_name, address, reason in sorted(now - self._skipped.get((family, name), frozenset())):
            fields = {"service": str(name), "slice": slice_name, "endpoint": address or "all"}
            log.info("endpoint skipped", **fields, reason=reason)
        self._skipped[family, name] = now


def _state(verdict: Verdict) -> str:
    """Return whether an endpoint is used, under which traffic policy, and why."""
    cluster, local = verdict.cluster, verdict.local
    if cluster is not None and local in (None, cluster):
        return f"{_used(cluster)}: {cluster.value}"
    policies = (("Cluster", cluster), ("Local", local))
    return "; ".join(
        # The text of NOT_LOCAL names the policy.
        f"{_used(reason)}{'' if reason is Reason.NOT_LOCAL else f' under policy {policy}'}: {reason.value}"
        for policy, reason in policies
        if reason
    )


def _used(reason: Reason) -> str:
    return "used" if reason.used else "not used"
