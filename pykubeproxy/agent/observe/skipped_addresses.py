"""Report addresses of Services that get no rules because the agent reaches the API server there."""

import structlog

from pykubeproxy.agent.observe.events import Recorder, address_skipped
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.objects import Family, address_and_port
from pykubeproxy.services.ports import PortName

# A tenant may create any number of Services: log and record this many of one sync.
_MOST = 20

log = structlog.get_logger()


class SkippedAddressReporter:
    """Report each skipped address in the log, and each Service once as an event. Call from the loop thread only."""

    def __init__(self, node_name: str, recorder: Recorder) -> None:
        self._node_name = node_name
        self._recorder = recorder
        # The skipped addresses with their ports, as of the last sync.
        self._known: dict[tuple[Family, PortName], tuple[str, ...]] = {}

    def sync_succeeded(self, report: SyncReport) -> None:
        """Report the addresses that the last sync did not skip."""
        family, recorded = report.family, {name.service_key for _, name in self._known}
        for name in report.gone:
            self._known.pop((family, name), None)
        new = []
        for port in (item.port for item in report.resolved):
            before = self._known.pop((family, port.name), ())
            if port.skipped_ips:
                now = tuple(address_and_port(ip, port.port) for ip in port.skipped_ips)
                self._known[family, port.name] = now
                if added := [address for address in now if address not in before]:
                    new.append((port.name, added))
        if others := len(new[_MOST:]):
            log.warning("more api server addresses skipped", family=family.value, service_ports=others)
        for name, addresses in new[:_MOST]:
            log.warning("api server address skipped", service=str(name), addresses=addresses)
            if name.service_key not in recorded:
                recorded.add(name.service_key)
                self._recorder.record(address_skipped(self._node_name, name.service_key, addresses))
