"""Report addresses of Services that get no rules because the agent needs them itself."""

from itertools import groupby

import structlog

from pykubeproxy.agent.observe.events import Recorder, address_skipped
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.objects import Family, address_and_port
from pykubeproxy.services.ports import PortName, SkippedIP

log = structlog.get_logger()


class SkippedAddressReporter:
    """Report each skipped address in the log, and each Service once as an event. Call from the loop thread only."""

    def __init__(self, node_name: str, recorder: Recorder) -> None:
        self._node_name = node_name
        self._recorder = recorder
        # The skipped addresses and their port, as of the last sync.
        self._known: dict[tuple[Family, PortName], tuple[tuple[SkippedIP, ...], int]] = {}

    def sync_succeeded(self, report: SyncReport) -> None:
        """Report the addresses that the last sync did not skip."""
        family, recorded = report.family, {name.service_key for _, name in self._known}
        for name in report.gone:
            self._known.pop((family, name), None)
        for port in (item.port for item in report.resolved):
            name, number = port.name, port.port
            ips, before = self._known.pop((family, name), ((), number))
            if not port.skipped_ips:
                continue
            self._known[family, name] = port.skipped_ips, number
            added = [it for it in port.skipped_ips if it not in ips or number != before]
            for reason, skipped in groupby(added, lambda it: it.reason):
                addresses = [address_and_port(ip, number) for ip, _ in skipped]
                log.warning(
                    "external address skipped",
                    about=name.service_key,
                    service=str(name),
                    addresses=addresses,
                    reason=reason.value,
                )
                if name.service_key not in recorded:
                    recorded.add(name.service_key)
                    self._recorder.record(
                        address_skipped(self._node_name, name.service_key, addresses, reason)
                    )
