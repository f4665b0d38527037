"""The agent's loop: one thread that takes in events and syncs, and owns all state."""

import math
import time
from collections.abc import Callable
from functools import partial

import structlog

from pykubeproxy.agent.drift.schedule import DriftSchedule, DriftScope
from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.agent.mailbox import AddressesChanged, Mailbox, Reconfigured, Stop
from pykubeproxy.agent.node_setup import set_up
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.query import Query
from pykubeproxy.agent.startup import Families, Opened, remove_nftables_mode, settle_memory
from pykubeproxy.agent.sync.limiter import MAX_PERIOD, SyncLimiter
from pykubeproxy.agent.sync.log import SyncLog
from pykubeproxy.agent.sync.report import Report
from pykubeproxy.agent.sync.tables import SyncFailed
from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.kernel import ExternalWrite, KernelError, memory
from pykubeproxy.objects import Event, Family, Key, Kind, Listed, Node
from pykubeproxy.rules.context import node_port_networks, primary_family, terms
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.flows import NodePortAddresses

# How long to wait for what only the Node object can tell, in seconds, as kube-proxy does.
WAIT_FOR_ADDRESSES = 30.0
WAIT_FOR_POD_CIDRS = 300.0

log = structlog.get_logger()


class Agent:
    """Keeps the tables of this node in line with the cluster until it is told to stop.

    `wait_for_node` is false where the Node object comes with everything else, or never. With `once`, `run` returns
    after the first sync.
    """

    def __init__(
        self,
        config: Config,
        node_name: str,
        families: Families,
        mailbox: Mailbox,
        observers: Observers,
        flows: FlowCleaner,
        wait_for_node: bool = True,
        once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._node_name = node_name
        self._families = families.opened
        self._lacking = families.lacking
        self._watch = families.watch
        self._mailbox = mailbox
        self._observers = observers
        self._flows = flows
        self._asked = False
        self._once = once
        self._clock = clock
        self._cluster = Cluster()
        self._touched: set[Key] = set()
        self._pace = SyncLimiter(config.iptables.min_sync_period, config.iptables.sync_period)
        self._journal = SyncLog(config.logging.verbosity)
        self._wait_for_node = wait_for_node
        self._node: Node | None = None
        self._started = clock()
        self._next_check = self._started + config.iptables.sync_period
        self._last_full = self._started
        self._in_place = False
        period = config.iptables.sync_period
        self._vigils = {it.tables.family: DriftSchedule(period, self._started) for it in families.opened}
        self._suspected: dict[Family, DriftScope] = {}
        for it in families.opened:
            it.tables.when_trying(partial(observers.at_work, it.tables.family))

    def run(self) -> int:
        """Serve until a Stop arrives; returns the exit status. The rules stay in place."""
        while True:
            for message in self._mailbox.take(self._next_time() - self._clock()):
                if isinstance(message, Stop):
                    say = log.error if message.code else log.info
                    say("stopping; the rules stay in place", reason=message.reason)
                    return message.code
                if isinstance(message, Query):
                    message.meet(self._cluster, [family.tables for family in self._families])
                elif isinstance(message, ExternalWrite):
                    self._hear(message)
                elif self._take_in(message):
                    self._request()
            now = self._clock()
            if now >= self._next_check:
                self._next_check = now + self._config.iptables.sync_period
                self._observers.checked()
            if self._in_place and now >= self._next_look():
                self._look()
            waiting_until = self._waiting_until()
            if self._asked and now >= waiting_until:
                self._asked = False
                self._observers.queued()
            if now < max(waiting_until, self._pace.due()):
                continue
            if complaint := self._unfit():
                log.error(complaint)
                return 1
            succeeded = self._sync()
            if self._once:
                return 0 if succeeded else 1

    def _take_in(self, message: Event | AddressesChanged | Reconfigured) -> bool:
        """Returns whether other rules may follow from it: a sync for nothing would make the next change wait."""
        if isinstance(message, Reconfigured):
            self._reconfigure(message.config)
            return True
        if isinstance(message, AddressesChanged):
            return bool(self._config.node_port_addresses)
        concerned, before = self._cluster.apply(message), self._node
        self._touched |= concerned
        self._observers.applied(message, concerned)
        self._observers.node(self._cluster.node(self._node_name))
        self._node = self._cluster.node(self._node_name) or self._node
        return bool(concerned) or self._node != before or isinstance(message, Listed)

    def _reconfigure(self, config: Config) -> None:
        self._config = config
        self._pace.adjust(config.iptables.min_sync_period, config.iptables.sync_period)
        self._journal.verbosity = self._flows.verbosity = config.logging.verbosity
        self._next_check = min(self._next_check, self._clock() + config.iptables.sync_period)
        for vigil in self._vigils.values():
            vigil.adjust(config.iptables.sync_period, self._clock())
        self._observers.reconfigured(config)
        set_up(config)

    def _request(self) -> None:
        self._pace.request(self._clock())
        self._asked = True

    def _next_time(self) -> float:
        """When something is to be done even if no message comes."""
        look = self._next_look() if self._in_place else math.inf
        return min(self._next_check, look, max(self._waiting_until(), self._pace.due()))

    def _next_look(self) -> float:
        return min(min(vigil.due(), vigil.calm_at) for vigil in self._vigils.values())

    def _waiting_until(self) -> float:
        """Until when nothing may be written, for want of something that may still come."""
        if not self._cluster.has_listed(Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.NODE):
            return math.inf
        if self._needs_pod_cidrs():
            return self._started + WAIT_FOR_POD_CIDRS
        if self._wait_for_node and not (self._node and self._node.addresses):
            return self._started + WAIT_FOR_ADDRESSES
        return -math.inf

    def _unfit(self) -> str | None:
        """Why this node cannot be served at all."""
        if self._needs_pod_cidrs():
            return f"node {self._node_name} has no podCIDRs, which detectLocalMode NodeCIDR needs"
        return self._lacking.get(primary_family(self._config, self._node))

    def _needs_pod_cidrs(self) -> bool:
        by_node = self._config.detect_local.mode is DetectLocalMode.NODE_CIDR
        return by_node and self._wait_for_node and not (self._node and self._node.pod_cidrs)

    def _hear(self, foreign: ExternalWrite) -> None:
        if foreign.family in self._vigils:
            self._vigils[foreign.family].heard(foreign, self._clock())

    def _look(self) -> None:
        """See whether others have changed our chains; if so, put them right, without waiting for the pace."""
        damaged = False
        for opened in self._families:
            family, vigil = opened.tables.family, self._vigils[opened.tables.family]
            begun = self._clock()
            if begun >= vigil.calm_at:
                vigil.calm()
                self._observers.left_alone(family)
            if begun >= vigil.due():
                suspicion = vigil.take(begun)
                try:
                    found = opened.tables.examine(suspicion.tables, suspicion.chains)
                except KernelError as error:
                    log.warning("the tables could not be looked at", family=family.value, error=str(error))
                    vigil.failed(suspicion, self._clock())
                    continue
                now = self._clock()
                vigil.looked(suspicion, now - begun, now)
                if suspicion.tables:
                    memory.trim()
                if found:
                    self._suspected[family] = suspicion
                    damaged = True
        if damaged:
            self._sync()

    def _repaired(self, report: Report) -> None:
        """Tell of what was found and put right."""
        suspicion, vigil = self._suspected.pop(report.family, None), self._vigils[report.family]
        if suspicion and report.repaired:
            now = self._clock()
            vigil.repaired(now)
            self._observers.repaired(report, suspicion.writers, now - suspicion.since, vigil.contested)

    def _sync(self) -> bool:
        """Bring all families up to date; returns whether that succeeded."""
        self._pace.started()
        if self._clock() - self._last_full >= MAX_PERIOD:
            self._last_full = self._clock()
            for family in self._families:
                family.tables.forget()
        touched, self._touched = self._touched, set()
        results = [self._sync_family(family, touched) for family in self._families]
        succeeded = all(results)
        self._pace.finished(self._clock(), succeeded)
        self._observers.settled(succeeded, self._node)
        if succeeded and not self._in_place:
            self._in_place = True
            services, slices = self._cluster.counts()
            log.info("rules are in place", services=services, endpoint_slices=slices)
            remove_nftables_mode()
            settle_memory()
        return succeeded

    def _sync_family(self, opened: Opened, touched: set[Key]) -> bool:
        family, full, begun = opened.tables.family, opened.tables.is_unknown, self._clock()
        if full:
            self._vigils[family].forget()
        try:
            facts = opened.facts(with_addresses=bool(self._config.node_port_addresses))
            on = terms(self._config, self._node_name, self._node, facts, family)
            report = opened.tables.sync(self._cluster, touched, on)
        except (KernelError, SyncFailed) as error:
            # The kernel may have failed before the tables heard of what changed: go through everything next time.
            opened.tables.forget()
            log.error(
                "rules could not be written; they will be tried again", family=family.value, error=str(error)
            )
            seconds, writing = self._clock() - begun, isinstance(error, SyncFailed)
            self._observers.failed(family, full, seconds, writing, str(error))
            return False
        self._journal.synced(report)
        if self._watch:
            self._watch.settled(family, report.held)
        if full:
            self._vigils[family].read(self._clock())
        self._repaired(report)
        self._observers.synced(report, report.rules, facts.addresses)
        networks = node_port_networks(self._config, on.options.node_ip, family)
        loopback = on.options.localhost_node_ports and family is Family.IPV4
        self._flows.synced(report, NodePortAddresses(networks, loopback), report.installed)
        return True
