"""Report quarantined service ports, once each, in the log and as events."""

import structlog

from pykubeproxy.agent.observe.events import Recorder, service_quarantined
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.objects import Family
from pykubeproxy.services.ports import PortName

log = structlog.get_logger()


class QuarantineReporter:
    """Compare the quarantine after each sync with the one before. Call from the loop thread only."""

    def __init__(self, node_name: str, recorder: Recorder) -> None:
        self._node_name = node_name
        self._recorder = recorder
        self._known: dict[Family, frozenset[PortName]] = {}
        self._untried: dict[Family, int] = {}

    def sync_succeeded(self, report: SyncReport) -> bool:
        """Report what changed since the last sync. Return whether a service port was quarantined."""
        family, before = report.family, self._known.get(report.family, frozenset())
        recorded = {name.service_key for known in self._known.values() for name in known}
        now = {port.port_name: port for port in report.quarantined if port.tried}
        self._known[family] = frozenset(now)
        new = [port for name, port in now.items() if name not in before]
        untried = len(report.quarantined) - len(now)
        if untried > self._untried.get(family, 0):
            log.error("service ports rejected until tried", family=family.value, service_ports=untried)
        self._untried[family] = untried
        for quarantined in new:
            name = quarantined.port_name
            log.error(
                "service quarantined",
                about=name.service_key,
                service=str(name),
                protocol=name.protocol,
                family=family.value,
                reason=quarantined.reason,
                rejects_clients=quarantined.rejects_clients,
            )
            if name.service_key not in recorded:
                recorded.add(name.service_key)
                self._recorder.record(
                    service_quarantined(self._node_name, name.service_key, quarantined.reason)
                )
        existing = {item.port.name.service_key for item in report.resolved}
        for name in sorted(name for name in before - now.keys() if name.service_key in existing):
            log.info(
                "service released from quarantine",
                about=name.service_key,
                service=str(name),
                family=family.value,
            )
        return bool(new)
