"""Stale UDP flows are deleted here, beside the syncs: a thread of its own, told by each sync what has changed."""

import errno
import ipaddress
import threading
import time
from collections.abc import Callable, Collection

import structlog

from pykubeproxy.agent.sync.log import ENDPOINTS, SYNCS
from pykubeproxy.agent.sync.report import Report
from pykubeproxy.kernel import conntrack
from pykubeproxy.kernel.conntrack import Flow
from pykubeproxy.kernel.local import LocalDestinations
from pykubeproxy.objects import Family, address_and_port
from pykubeproxy.services.flows import End, Flush, Frontends, NodePortAddresses, UdpPorts

# After a failure that may pass, in seconds.
RETRY_PERIOD = 30.0
# The table cannot be had at all: not permitted, or the kernel has none that can be read.
_HOPELESS = (errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT)

log = structlog.get_logger()

Done = Callable[[Family, float, int], None]


class FlowCleaner:
    """Deletes the UDP flows that a change of Services or endpoints has left behind, and no others.

    `synced` is for the thread that syncs, `run` for a thread of its own. `done` is called from that one after each
    look through a family's flows, with the seconds it took and how many flows were deleted.
    """

    name = "udp-flows"

    def __init__(self, verbosity: int, done: Done = lambda *_: None) -> None:
        self.verbosity = verbosity
        self._done = done
        self._ports = {family: UdpPorts(family) for family in Family}
        self._lock = threading.Lock()
        self._asked: dict[Family, Flush] = {}
        self._wake = threading.Event()
        self._stopped = False
        self._complained: set[Family] = set()

    def synced(
        self, report: Report, at: NodePortAddresses, installed: Collection[tuple[str, int]] = ()
    ) -> None:
        """Take in what a sync did; `at` is where node ports are served. Returns at once.

        A full sync that had something to write may have ended a time without rules. `installed` is what it found to
        lead to UDP services (rules.installed).
        """
        repaired = report.full and report.wrote
        flush = self._ports[report.family].follow(report.served, report.gone, at, repaired, installed)
        if flush is not None:
            self._ask(flush)
            self._wake.set()

    def run(self) -> None:
        """Do what is asked for, whenever it is, until `stop`."""
        while not self._stopped:
            self.clean()
            self._wake.wait(RETRY_PERIOD if self._asked else None)
            self._wake.clear()

    def stop(self) -> None:
        """Make `run` return once it is done with what it is doing; for any thread. There is no way back."""
        self._stopped = True
        self._wake.set()

    def clean(self) -> None:
        """Do at once what is asked for now. Not while `run` is running."""
        with self._lock:
            asked, self._asked = self._asked, {}
        for flush in asked.values():
            try:
                self._clean(flush)
                self._complained.discard(flush.family)
            except OSError as error:
                self._failed(flush, error)

    def _ask(self, flush: Flush) -> None:
        with self._lock:
            self._asked[flush.family] = flush.after(self._asked.get(flush.family))

    def _clean(self, flush: Flush) -> None:
        started = time.monotonic()
        deleted = 0
        with LocalDestinations() as local:
            known, frontends = flush, Frontends(flush, local.has)
            for flow in conntrack.udp_flows(flush.family):
                if not frontends.is_stale(flow.destination, flow.reply_source):
                    continue
                # Syncs go on meanwhile: what is new since then must not be taken for stale.
                if (newer := self._asked.get(flush.family, known)) is not known:
                    known, frontends = newer, Frontends(newer.after(flush), local.has)
                    if not frontends.is_stale(flow.destination, flow.reply_source):
                        continue
                if conntrack.delete(flow):
                    deleted += 1
                    self._log_flow(flow)
        seconds = time.monotonic() - started
        if self.verbosity >= SYNCS:
            log.info(
                "looked for stale UDP flows",
                family=flush.family.value,
                deleted=deleted,
                seconds=round(seconds, 4),
            )
        self._done(flush.family, seconds, deleted)

    def _log_flow(self, flow: Flow) -> None:
        if self.verbosity >= ENDPOINTS:
            log.info(
                "stale UDP flow deleted",
                source=_text(flow.source),
                destination=_text(flow.destination),
                endpoint=_text(flow.reply_source),
            )

    def _failed(self, flush: Flush, error: OSError) -> None:
        """Say so once; what may pass is tried again."""
        hopeless = error.errno in _HOPELESS
        if not hopeless:
            with self._lock:
                newer = self._asked.get(flush.family)
                self._asked[flush.family] = newer.after(flush) if newer else flush
        if flush.family in self._complained:
            return
        self._complained.add(flush.family)
        log.warning(
            "stale UDP flows are not deleted: the connection tracking table cannot be read;"
            " clients that keep their source port may stay with pods that are gone",
            family=flush.family.value,
            error=error.strerror or str(error),
            advice="run as root or with CAP_NET_ADMIN"
            if error.errno == errno.EPERM
            else "load the kernel module nf_conntrack_netlink"
            if hopeless
            else f"it is tried again every {RETRY_PERIOD:g} s",
        )


def _text(end: End) -> str:
    address, port = end
    return address_and_port(str(ipaddress.ip_address(address)), port)
