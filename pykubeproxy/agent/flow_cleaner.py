"""Delete stale UDP flows from conntrack after syncs, in a separate thread."""

import errno
import ipaddress
import math
import threading
import time
from collections.abc import Callable

import structlog

from pykubeproxy.agent.notices import Notice, SyncReport
from pykubeproxy.agent.observe.service_reports import ENDPOINTS, SYNCS
from pykubeproxy.kernel import conntrack, network
from pykubeproxy.kernel.conntrack import TrackedFlow
from pykubeproxy.objects import Family, address_and_port
from pykubeproxy.services.flows import Flush, StaleFlowFilter, UdpPorts

RETRY_PERIOD = 30.0  # seconds
# Errors that a retry does not help against: no permission, or no conntrack over netlink.
_PERMANENT = (errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT)

log = structlog.get_logger()

Cleaned = Callable[[Family, float, int], None]


class FlowCleaner:
    """Delete the UDP flows that a change of Services or endpoints made stale.

    The reconcile loop calls `notice`; `run` needs its own thread. After each scan of a family's flows, that thread calls
    `cleaned` with the family, the duration in seconds and the number of deleted flows.
    """

    name = "udp-flows"

    def __init__(self, verbosity: int, cleaned: Cleaned = lambda *_: None) -> None:
        self.verbosity = verbosity
        self._cleaned = cleaned
        self._ports = {family: UdpPorts(family) for family in Family}
        self._lock = threading.Lock()
        self._pending: dict[Family, Flush] = {}
        # Since when the oldest request has waited: one that is pending, and one that the thread works on.
        self._requested = self._begun = math.inf
        self._wake = threading.Event()
        self._warned: set[Family] = set()

    def notice(self, notice: Notice) -> None:
        """Request a scan if a sync changed UDP services, and return at once."""
        if isinstance(notice, SyncReport):
            self._synced(notice)

    def _synced(self, report: SyncReport) -> None:
        # A drift repair or a full sync that wrote something may have ended a period without rules.
        repaired = bool(report.drift) or (report.full and report.wrote)
        ports = self._ports[report.family]
        rejected = {quarantined.port_name for quarantined in report.quarantined}
        flush = ports.update(
            report.resolved, report.gone, report.node_ports, repaired, report.installed, rejected
        )
        if flush is not None:
            with self._lock:
                self._pending[flush.family] = flush.merged_with(self._pending.get(flush.family))
                self._requested = min(self._requested, time.monotonic())
            self._wake.set()

    def run(self) -> None:
        """Do each requested scan; never return."""
        while True:
            self.clean()
            self._wake.wait(RETRY_PERIOD if self._pending else None)
            self._wake.clear()

    def waiting_seconds(self) -> float:
        """Return for how long a requested scan has not been done; 0 if there is none. Any thread may call it."""
        with self._lock:
            return max(0.0, time.monotonic() - min(self._requested, self._begun))

    def clean(self) -> None:
        """Do the requested scans now. Do not call while `run` runs."""
        with self._lock:
            pending, self._pending = self._pending, {}
            self._begun, self._requested = self._requested, math.inf
        for flush in pending.values():
            try:
                self._clean(flush)
                self._warned.discard(flush.family)
            except OSError as error:
                self._failed(flush, error)
        with self._lock:
            self._begun = math.inf

    def _clean(self, flush: Flush) -> None:
        started = time.monotonic()
        deleted = 0
        latest, frontends = flush, StaleFlowFilter(flush, network.is_local)
        for flow in conntrack.udp_flows(flush.family):
            if not frontends.is_stale(flow.destination, flow.reply_source):
                continue
            # A sync may have added endpoints since: their flows are not stale.
            if (newer := self._pending.get(flush.family, latest)) is not latest:
                latest, frontends = newer, StaleFlowFilter(newer.merged_with(flush), network.is_local)
                if not frontends.is_stale(flow.destination, flow.reply_source):
                    continue
            if conntrack.delete(flow):
                deleted += 1
                if self.verbosity >= ENDPOINTS:
                    _log_deleted(flow)
        seconds = time.monotonic() - started
        if self.verbosity >= SYNCS:
            log.info(
                "UDP flows scanned", family=flush.family.value, deleted=deleted, seconds=round(seconds, 4)
            )
        self._cleaned(flush.family, seconds, deleted)

    def _failed(self, flush: Flush, error: OSError) -> None:
        """Log the first failure, and request the scan again unless it is permanent."""
        if error.errno == errno.EPERM:
            advice = "run as root or with CAP_NET_ADMIN"
        elif error.errno in _PERMANENT:
            advice = "load the kernel module nf_conntrack_netlink"
        else:
            advice = f"none needed, retrying every {RETRY_PERIOD:g} s"
            with self._lock:
                newer = self._pending.get(flush.family)
                self._pending[flush.family] = newer.merged_with(flush) if newer else flush
                self._requested = min(self._requested, self._begun)
        if flush.family not in self._warned:
            self._warned.add(flush.family)
            log.warning(
                "stale UDP flows not deleted",
                family=flush.family.value,
                error=f"cannot read or change the conntrack table: {error.strerror or error}",
                advice=advice,
            )


def _log_deleted(flow: TrackedFlow) -> None:
    source, destination, endpoint = (
        address_and_port(str(ipaddress.ip_address(address)), port)
        for address, port in (flow.source, flow.destination, flow.reply_source)
    )
    log.info("stale UDP flow deleted", source=source, destination=destination, endpoint=endpoint)
