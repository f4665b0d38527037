"""What people are told of services that are set aside: once in the log and as an event, and once when that is over."""

import structlog

from pykubeproxy.agent.observe.events import Recorder, set_aside
from pykubeproxy.agent.quarantine.quarantine import Quarantined
from pykubeproxy.agent.sync.report import Report
from pykubeproxy.objects import Family
from pykubeproxy.services.ports import PortName

# What the kernel lacks may concern hundreds of services: so many are told of one by one at a time.
_MOST = 20

log = structlog.get_logger()


class QuarantineReporter:
    """Compares each sync with the one before. For one thread."""

    def __init__(self, node_name: str, recorder: Recorder) -> None:
        self._node_name = node_name
        self._recorder = recorder
        self._known: dict[Family, dict[PortName, Quarantined]] = {}

    def synced(self, report: Report) -> bool:
        """Tell what is new in a report; returns whether service ports were set aside."""
        before = self._known.get(report.family, {})
        now = {aside.name: aside for aside in report.aside}
        told = {name.service_key for known in self._known.values() for name in known}
        self._known[report.family] = now
        new = [aside for name, aside in now.items() if name not in before]
        if others := new[_MOST:]:
            log.error(
                "more services are set aside; `pykubeproxy status -o json` has them all",
                services=len(others),
                family=report.family.value,
            )
        for aside in new[:_MOST]:
            self._complain(report.family, aside)
            if (key := aside.name.service_key) not in told:
                told.add(key)
                self._recorder.record(set_aside(self._node_name, key, aside.why))
        served = {item.port.name for item in report.served}
        for name in before:
            if name not in now and name in served:
                log.info("a service is served again", service=str(name), family=report.family.value)
        return bool(new)

    def _complain(self, family: Family, aside: Quarantined) -> None:
        refused = "its new connections are refused" if aside.refuses else "its packets are not touched"
        log.error(
            f"a service is set aside, for iptables refuses its rules: {refused}, all others are served;"
            " it is tried again when it changes, and once an hour",
            service=str(aside.name),
            protocol=aside.name.protocol,
            family=family.value,
            reason=aside.why,
        )
