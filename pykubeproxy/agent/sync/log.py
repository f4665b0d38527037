"""What the log says of syncs and endpoints, for those who want to see why a packet goes where it goes."""

from collections.abc import Iterable, Mapping

import structlog

from pykubeproxy.agent.sync.report import Report
from pykubeproxy.objects import Family
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.resolve import ResolvedPort
from pykubeproxy.services.selection import Reason, Verdict

# From these values of -v on, syncs and single endpoints are logged.
SYNCS, ENDPOINTS = 2, 4

log = structlog.get_logger()


class SyncLog:
    """Logs each sync, and each endpoint that appeared, changed or went since the last one.

    What it needs to remember for that it keeps only if endpoints are to be logged.
    """

    def __init__(self, verbosity: int) -> None:
        self.verbosity = verbosity
        self._seen: dict[tuple[Family, PortName], Mapping[str, str]] = {}
        self._passed: dict[tuple[Family, PortName], frozenset[tuple[str, str, str]]] = {}

    def synced(self, report: Report) -> None:
        """Log what one sync of one family did."""
        if self.verbosity >= ENDPOINTS:
            self._endpoints(report)
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

    def _endpoints(self, report: Report) -> None:
        for item in report.served:
            self._compare(report.family, item.port.name, _standing(item.selection.verdicts))
            self._note_passed(report.family, item)
        for name in report.gone:
            self._compare(report.family, name, {})
            self._passed.pop((report.family, name), None)

    def _compare(self, family: Family, name: PortName, now: Mapping[str, str]) -> None:
        before = self._seen.pop((family, name), {})
        if now:
            self._seen[family, name] = now
        for target in sorted(before.keys() - now.keys()):
            log.info("endpoint went", service=str(name), endpoint=target)
        for target, standing in now.items():
            if target not in before:
                log.info("endpoint appeared", service=str(name), endpoint=target, state=standing)
            elif before[target] != standing:
                log.info(
                    "endpoint changed",
                    service=str(name),
                    endpoint=target,
                    state=standing,
                    was=before[target],
                )

    def _note_passed(self, family: Family, item: ResolvedPort) -> None:
        """Log entries of EndpointSlices that are no endpoints of this port at all."""
        name = item.port.name
        now = frozenset((passed.slice_name, passed.address, passed.reason.value) for passed in item.passed)
        for slice_name, address, reason in sorted(now - self._passed.get((family, name), frozenset())):
            log.info(
                "passed over", service=str(name), slice=slice_name, endpoint=address or "all", reason=reason
            )
        self._passed[family, name] = now


def _standing(verdicts: Iterable[Verdict]) -> dict[str, str]:
    """For each endpoint whether it is used, under which policy, and why."""
    return {verdict.backend.target: _sentence(verdict) for verdict in verdicts}


def _sentence(verdict: Verdict) -> str:
    cluster, local = verdict.cluster, verdict.local
    if cluster is not None and (local is None or local == cluster):
        return f"{'used' if cluster.used else 'passed over'}: {cluster.value}"
    parts = [("policy Cluster", cluster), ("policy Local", local)]
    return "; ".join(
        f"{'used' if reason.used else 'passed over'}{_under(policy, reason)}: {reason.value}"
        for policy, reason in parts
        if reason
    )


def _under(policy: str, reason: Reason) -> str:
    # This one names the policy itself.
    return "" if reason is Reason.NOT_LOCAL else f" under {policy}"
