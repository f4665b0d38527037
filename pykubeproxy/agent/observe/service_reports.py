"""Report what a sync shows about Services: in the log, and as Kubernetes Events."""

from collections.abc import Mapping
from itertools import groupby

import structlog

from pykubeproxy.agent.notices import Notice, SyncReport
from pykubeproxy.agent.observe.events import Recorder
from pykubeproxy.objects import Family, Key, address_and_port
from pykubeproxy.services.ports import PortName, SkippedIP
from pykubeproxy.services.selection import EndpointVerdict, Reason, ResolvedPort

log = structlog.get_logger()
# The verbosity (-v) from which syncs and single endpoints are logged.
SYNCS, ENDPOINTS = 2, 4


class ServiceReporter:
    """Report, once each, why the node does not serve Services as they ask. Call from the loop thread only.

    `affinity_limit` is maxAffinityLists. Each finding is a log line; each Service gets one event for all of a kind.
    """

    def __init__(self, recorder: Recorder, affinity_limit: int) -> None:
        self._recorder = recorder
        self._affinity_limit = affinity_limit
        self._quarantined: dict[Family, frozenset[PortName]] = {}
        self._held: dict[Family, int] = {}
        # The skipped addresses and their port, as of the last sync.
        self._skipped: dict[tuple[Family, PortName], tuple[tuple[SkippedIP, ...], int]] = {}
        self._without_affinity: set[Key] = set()

    def notice(self, notice: Notice) -> None:
        """Report what changed since the last sync."""
        if isinstance(notice, SyncReport):
            self._report_skipped(notice)
            self._report_affinity(notice)
            self._report_quarantine(notice)

    def _report_quarantine(self, report: SyncReport) -> None:
        """Report ports that enter or leave quarantine. Suspect ones are reported as a number, when there are more."""
        family, before = report.family, self._quarantined.get(report.family, frozenset())
        recorded = {name.service_key for known in self._quarantined.values() for name in known}
        now = {port.port_name: port for port in report.quarantined}
        self._quarantined[family] = frozenset(now)
        if report.held > self._held.get(family, 0):
            log.error(
                "rules rejected, looking for the service", family=family.value, service_ports=report.held
            )
        self._held[family] = report.held
        new = [port for name, port in now.items() if name not in before]
        for quarantined in new:
            name, reason = quarantined.port_name, quarantined.reason
            log.error(
                "service quarantined",
                about=name.service_key,
                service=str(name),
                protocol=name.protocol,
                family=family.value,
                reason=reason,
                rejects_clients=quarantined.rejects_clients,
            )
            what = f"does not serve {name.service_key}: {reason}"
            self._record(name.service_key, "ServiceQuarantined", what, recorded)
        existing = {item.port.name.service_key for item in report.resolved}
        for name in sorted(name for name in before - now.keys() if name.service_key in existing):
            log.info(
                "service released from quarantine",
                about=name.service_key,
                service=str(name),
                family=family.value,
            )

    def _report_skipped(self, report: SyncReport) -> None:
        """Report addresses that get no rules because the agent needs them itself, if the last sync served them."""
        family, recorded = report.family, {name.service_key for _, name in self._skipped}
        for name in report.gone:
            self._skipped.pop((family, name), None)
        for port in (item.port for item in report.resolved):
            name, number = port.name, port.port
            ips, before = self._skipped.pop((family, name), ((), number))
            if not port.skipped_ips:
                continue
            self._skipped[family, name] = port.skipped_ips, number
            added = [skipped for skipped in port.skipped_ips if skipped not in ips or number != before]
            for reason, skipped_ips in groupby(added, lambda skipped: skipped.reason):
                addresses = [address_and_port(ip, number) for ip, _ in skipped_ips]
                log.warning(
                    "external address skipped",
                    about=name.service_key,
                    service=str(name),
                    addresses=addresses,
                    reason=reason.value,
                )
                what = f"does not serve {name.service_key} at {', '.join(addresses)}: {reason.value}"
                self._record(name.service_key, "AddressSkipped", what, recorded)

    def _report_affinity(self, report: SyncReport) -> None:
        """Report Services without the session affinity that they ask for, until they are gone."""
        known, limit, ports = (
            self._without_affinity,
            self._affinity_limit,
            [item.port for item in report.resolved],
        )
        known -= {name.service_key for name in report.gone} - {port.name.service_key for port in ports}
        unkept = {port.name.service_key: port.unkept_lists for port in ports if port.unkept_lists}
        for key in sorted(unkept.keys() - known):
            log.warning(
                "session affinity not kept", about=key, service=str(key), lists=unkept[key], limit=limit
            )
            what = (
                f"serves {key} without session affinity, which needs {unkept[key]} lists of clients: the Services of"
                f" a namespace may have {limit}, the oldest Service first (maxAffinityLists)"
            )
            self._record(key, "AffinityNotKept", what, known)

    def _record(self, service: Key, reason: str, what: str, recorded: set[Key]) -> None:
        """Record an event unless its Service is among those recorded, and add the Service."""
        if service not in recorded:
            recorded.add(service)
            self._recorder.on_service(service, reason, what)


class SyncLog:
    """Log each sync, and each endpoint that a sync added, changed or removed. Call from the loop thread only.

    Remember endpoints only if `verbosity` is at least `ENDPOINTS`.
    """

    def __init__(self, verbosity: int) -> None:
        self.verbosity = verbosity
        self._endpoints: dict[tuple[Family, PortName], Mapping[str, str]] = {}
        self._skipped: dict[tuple[Family, PortName], frozenset[tuple[str, str, str]]] = {}

    def notice(self, notice: Notice) -> None:
        """Log the sync of one family."""
        if isinstance(notice, SyncReport):
            self._log(notice)

    def _log(self, report: SyncReport) -> None:
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
        about = {"about": name.service_key, "detail": True, "service": str(name)}
        for target in sorted(before.keys() - now.keys()):
            log.info("endpoint removed", **about, endpoint=target)
        for target, state in now.items():
            fields = {**about, "endpoint": target, "state": state}
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
            log.info(
                "endpoint skipped",
                about=name.service_key,
                detail=True,
                service=str(name),
                slice=slice_name,
                endpoint=address or "all",
                reason=reason,
            )
        self._skipped[family, name] = now


def _state(verdict: EndpointVerdict) -> str:
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
