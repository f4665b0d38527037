"""The agent's loop: one thread that takes in events and syncs, and owns all state."""

import time
from collections.abc import Callable, Sequence

import structlog

from pykubeproxy.agent.journal import Journal
from pykubeproxy.agent.mailbox import Mailbox, Stop
from pykubeproxy.agent.pace import MAX_PERIOD, Pace
from pykubeproxy.agent.startup import Opened
from pykubeproxy.agent.tables import SyncFailed
from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.kernel import KernelError
from pykubeproxy.objects import Family, Key, Kind, Node
from pykubeproxy.rules.terms import primary_family, terms
from pykubeproxy.services.cluster import Cluster

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
        families: Sequence[Opened],
        lacking: dict[Family, str],
        mailbox: Mailbox,
        wait_for_node: bool = True,
        once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._node_name = node_name
        self._families = families
        self._lacking = lacking
        self._mailbox = mailbox
        self._once = once
        self._clock = clock
        self._cluster = Cluster()
        self._touched: set[Key] = set()
        self._pace = Pace(config.iptables.min_sync_period, config.iptables.sync_period)
        self._journal = Journal(config.logging.verbosity)
        self._started = clock()
        self._patience = self._started + (WAIT_FOR_ADDRESSES if wait_for_node else 0.0)
        self._wait_for_node = wait_for_node
        self._next_check = self._started + config.iptables.sync_period
        self._last_full = self._started
        self._in_place = False

    def run(self) -> int:
        """Serve until a Stop arrives; returns the exit status. The rules stay in place."""
        while True:
            for message in self._mailbox.take(self._next_time() - self._clock()):
                if isinstance(message, Stop):
                    log.info("stopping; the rules stay in place", reason=message.reason)
                    return message.code
                self._touched |= self._cluster.apply(message)
                self._pace.request(self._clock())
            now = self._clock()
            if now >= self._next_check:
                self._check(now)
            if self._waits_for(now):
                continue
            if (complaint := self._unfit()) is not None:
                log.error(complaint)
                return 1
            if now >= self._pace.due():
                succeeded = self._sync()
                if self._once:
                    return 0 if succeeded else 1

    def _next_time(self) -> float:
        """When something is to be done even if no message comes."""
        waits = self._waits_for(self._clock())
        return min(self._next_check, self._patience if waits else self._pace.due())

    def _waits_for(self, now: float) -> str:
        """What is still missing before anything may be written; "" for nothing."""
        if not self._cluster.has_listed(Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.NODE):
            return "the first lists"
        if self._wait_for_node and now < self._patience and not self._known_node().addresses:
            return "the node's addresses"
        if self._needs_pod_cidrs() and now < self._started + WAIT_FOR_POD_CIDRS:
            self._patience = self._started + WAIT_FOR_POD_CIDRS
            return "the node's pod CIDRs"
        return ""

    def _unfit(self) -> str | None:
        """Why this node cannot be served at all."""
        if self._needs_pod_cidrs():
            return f"node {self._node_name} has no podCIDRs, which detectLocalMode NodeCIDR needs"
        primary = primary_family(self._config, self._cluster.node(self._node_name))
        return self._lacking.get(primary)

    def _needs_pod_cidrs(self) -> bool:
        mode = self._config.detect_local.mode
        return mode is DetectLocalMode.NODE_CIDR and self._wait_for_node and not self._known_node().pod_cidrs

    def _known_node(self) -> Node:
        return self._cluster.node(self._node_name) or Node(self._node_name)

    def _check(self, now: float) -> None:
        """See whether somebody has flushed a table; if so, everything is written again."""
        self._next_check = now + self._config.iptables.sync_period
        for family in self._families if self._in_place else ():
            try:
                intact = family.tables.is_intact()
            except KernelError as error:
                log.warning(
                    "the tables could not be looked at", family=family.tables.family.value, error=str(error)
                )
                continue
            if not intact:
                log.warning(
                    "somebody has flushed our chains; writing them again", family=family.tables.family.value
                )
                family.tables.forget()
                self._pace.request(now)

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
        if succeeded and not self._in_place:
            self._in_place = True
            services, slices = self._cluster.counts()
            log.info("rules are in place", services=services, endpoint_slices=slices)
        return succeeded

    def _sync_family(self, opened: Opened, touched: set[Key]) -> bool:
        family = opened.tables.family
        try:
            facts = opened.facts(with_addresses=bool(self._config.node_port_addresses))
            node = self._cluster.node(self._node_name)
            on = terms(self._config, self._node_name, node, facts, family)
            report = opened.tables.sync(self._cluster, touched, on)
        except (KernelError, SyncFailed) as error:
            log.error(
                "rules could not be written; they will be tried again", family=family.value, error=str(error)
            )
            return False
        self._journal.synced(report)
        return True
