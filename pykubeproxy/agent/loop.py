"""The reconcile loop: one thread that applies events, checks for drift and syncs. It owns all state."""

import math
import time
from collections.abc import Callable

import structlog

from pykubeproxy import garbage
from pykubeproxy.agent.family import FamilyController
from pykubeproxy.agent.limiter import MAX_PERIOD, SyncLimiter
from pykubeproxy.agent.mailbox import AddressesChanged, Mailbox, Message, Stop, Task, log_stop
from pykubeproxy.agent.node_rules import LeftoverSchedule, remove_leftovers, route_loopback
from pykubeproxy.agent.notices import EventApplied, SyncsEnded
from pykubeproxy.agent.observe.health import Heartbeat
from pykubeproxy.agent.observe.observers import Observers
from pykubeproxy.agent.observe.status import LoopQuery
from pykubeproxy.agent.pending import Work
from pykubeproxy.agent.startup import Families, StartGate
from pykubeproxy.config import Config
from pykubeproxy.kernel import ExternalWrite, KernelError, system
from pykubeproxy.objects import Event, Family, Listed, Node
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ApiServers

log = structlog.get_logger()


class Agent:
    """Keep the tables of this node in line with the cluster.

    `wait_for_node` is false if no Node object will arrive. With `once`, `run` returns after the first sync.
    `api_servers` returns the addresses at which this process reaches its API servers, and never blocks.
    """

    def __init__(
        self,
        config: Config,
        node_name: str,
        families: Families,
        mailbox: Mailbox,
        observers: Observers,
        heartbeat: Heartbeat,
        wait_for_node: bool = True,
        once: bool = False,
        api_servers: Callable[[], ApiServers] = frozenset,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now = clock()
        self._config = config
        self._node_name = node_name
        self._mailbox = mailbox
        self._observers = observers
        self._heartbeat = heartbeat
        self._once = once
        self._read_api_servers = api_servers
        self._api_servers: ApiServers = frozenset()
        # The addresses for which no rules of an earlier proxy are left.
        self._released: ApiServers = frozenset()
        self._clock = clock
        self._families = [
            FamilyController(opened, config, node_name, observers.notice, families.watch, clock)
            for opened in families.opened
        ]
        # The steps between syncs, for each family, in the order of their next chance.
        self._between = [
            (step, family) for step in (Work.LOSSES, Work.TURN, Work.TRY) for family in self._families
        ]
        # How long the last of these steps took, in seconds.
        self._work_seconds = 0.0
        self._gate = StartGate(config, node_name, families.unsupported, wait_for_node, now)
        self._limiter = SyncLimiter(config.iptables.min_sync_period, config.iptables.sync_period)
        self._backend = families.backend
        self._leftovers = LeftoverSchedule(config.iptables.sync_period, now)
        self._cluster = Cluster()
        observers.recorder.uid_of = self._cluster.service_uid
        self._node: Node | None = None
        self._in_sync = False  # since the first successful sync
        self._next_retry = now + config.iptables.sync_period
        self._last_resync = now

    def run(self) -> int:
        """Reconcile until a Stop arrives, and return the exit status. The rules stay in place."""
        while True:
            for message in self._wait():
                self._heartbeat.progress()
                if isinstance(message, Stop):
                    return log_stop(message)
                self._handle(message)
            self._mailbox.handled()
            self._follow_api_servers()
            self._retry_start()
            self._repair_drift()
            if not self._may_sync():
                self._work_between(self._sync_due())
                continue
            if not self._in_sync and (obstacle := self._gate.obstacle(self._node)):
                log.error("cannot serve this node", reason=obstacle)
                return 1
            succeeded = self._sync_round()
            if self._once:
                return 0 if succeeded and self._take_all_turns() else 1
            if succeeded:
                # Now others wait least, for the next sync is not due yet.
                self._work_between(math.inf)

    def _wait(self) -> list[Message]:
        seconds = self._next_wakeup() - self._clock()
        self._heartbeat.idle()
        messages = self._mailbox.take(seconds)
        self._heartbeat.progress()
        return messages

    def _handle(self, message: Task) -> None:
        if isinstance(message, LoopQuery):
            message.answer(self._cluster, [family.tables for family in self._families])
        elif isinstance(message, ExternalWrite):
            for family in self._families:
                if family.family is message.family:
                    family.external_write(message)
        elif isinstance(message, AddressesChanged):
            if self._config.node_port_addresses:
                self._request_sync()
        else:
            self._apply(message)

    def _apply(self, event: Event) -> None:
        """Apply an event, and sync the families whose rules it may change: a needless sync delays the next change."""
        changes, before = self._cluster.apply(event), self._node
        self._node = self._cluster.node(self._node_name)
        self._observers.notice(EventApplied(event, changes, self._node))
        if _rule_facts(self._node) != _rule_facts(before) or (
            isinstance(event, Listed) and not self._in_sync
        ):
            self._request_sync()
        arrived, listed = self._mailbox.waiting_since(), isinstance(event, Listed)
        for family in self._families:
            of_family = {
                key: change.loses for key, change in changes.items() if change.objects((family.family,))
            }
            if of_family:
                family.request(arrived, of_family, listed)

    def _request_sync(self) -> None:
        for family in self._families:
            family.request(self._mailbox.waiting_since())

    def _next_wakeup(self) -> float:
        due = self._sync_due()
        if not self._in_sync:
            return min(self._next_retry, due)
        work_from = due if self._clock() + self._work_seconds > due else -math.inf
        work = min(family.next_due(work_from) for family in self._families)
        return min(self._next_retry, work, self._leftovers.due, due)

    def _retry_start(self) -> None:
        """Every syncPeriod, bind addresses that were in use; without lists, delete rules that may keep them away."""
        now = self._clock()
        if now >= self._next_retry:
            self._next_retry = now + self._config.iptables.sync_period
            self._observers.retry_listeners()
            if self._gate.opens_at(self._cluster, self._node) == math.inf:
                self._release_api_servers()

    def _release_api_servers(self) -> None:
        """Without lists, delete rules of an earlier proxy that redirect this process from its API servers."""
        if self._api_servers == self._released:
            return
        try:
            for family in self._families:
                if family.tables.release(self._api_servers):
                    log.warning("api server address released", family=family.family.value)
        except KernelError as error:
            log.warning("api server address not released", error=str(error))
            return
        self._released = self._api_servers

    def _follow_api_servers(self) -> None:
        found = self._read_api_servers()
        if found != self._api_servers:
            self._api_servers = found
            self._request_sync()

    def _repair_drift(self) -> None:
        """Check for drift if a check is due, and repair it at once, regardless of the rate limit."""
        if self._in_sync:
            drifted = [family.check_drift() for family in self._families]
            if any(drifted):
                self._sync_round()

    def _work_between(self, until: float) -> None:
        """Remove leftovers, or take one step between two syncs.

        Only losses go on if the step would not end before `until`, when the next sync is due.
        """
        if not self._in_sync:
            return
        now = self._clock()
        if now >= self._leftovers.due:
            self._remove_leftovers()
            return
        fits = now + self._work_seconds <= until
        for step, family in self._between:
            if now >= family.due(step) and (fits or step is Work.LOSSES):
                self._take_step(step, family)
                self._work_seconds = self._clock() - now
                # The others come first the next time: a tenant may cause some of it without end.
                self._between.remove((step, family))
                self._between.append((step, family))
                return

    def _take_step(self, step: Work, family: FamilyController) -> None:
        if step is not Work.TRY:
            self._sync_apart(step, family)
        elif family.try_ports(self._cluster):
            family.request(self._mailbox.waiting_since())

    def _remove_leftovers(self) -> None:
        found = remove_leftovers(self._config, self._backend, self._heartbeat.progress)
        self._leftovers.checked(found, self._clock())

    def _sync_apart(self, step: Work, family: FamilyController) -> bool:
        """Sync some waiting Services of a family. Return whether that succeeded."""
        succeeded = self._sync_family(step, family)
        if not succeeded:
            self._limiter.finished(self._clock(), succeeded)
        self._observers.notice(SyncsEnded(False, self._node))
        return succeeded

    def _take_all_turns(self) -> bool:
        succeeded = True
        for family in self._families:
            succeeded = self._take_all_tries(family) and succeeded
            failed = 0
            while family.tables.waiting > failed:
                failed += not (self._sync_apart(Work.TURN, family) and self._take_all_tries(family))
            succeeded = succeeded and not failed
        return succeeded

    def _take_all_tries(self, family: FamilyController) -> bool:
        while family.is_searching and family.due(Work.TRY) <= self._clock():
            if family.try_ports(self._cluster) and not self._sync_changes(family):
                return False
        return not family.is_searching

    def _sync_due(self) -> float:
        """Return when the next sync is due, in an hour at the latest."""
        return max(
            self._gate.opens_at(self._cluster, self._node),
            self._limiter.due(min((family.requested for family in self._families), default=math.inf)),
        )

    def _may_sync(self) -> bool:
        now = self._clock()
        if now >= self._gate.opens_at(self._cluster, self._node):
            for family in self._families:
                family.report_queued()
        return now >= self._sync_due()

    def _sync_round(self) -> bool:
        if self._clock() - self._last_resync >= MAX_PERIOD:
            self._last_resync = self._clock()
            for family in self._families:
                family.tables.retry_tree()
        results = [self._sync_changes(family) for family in self._families]
        succeeded = all(results)
        self._limiter.finished(self._clock(), succeeded)
        self._observers.notice(SyncsEnded(succeeded, self._node))
        if succeeded and not self._in_sync:
            self._in_sync = True
            services, slices = self._cluster.counts()
            log.info("rules in place", services=services, endpoint_slices=slices)
            self._remove_leftovers()
            garbage.collect_now()
            system.release_memory()
        return succeeded

    def _sync_changes(self, family: FamilyController) -> bool:
        """Sync a family if it needs it, then what waiting Services have lost. Return whether that succeeded.

        If the second sync fails, all others have their rules.
        """
        if not family.needs_sync:
            return True
        if not self._sync_family(Work.CHANGES, family):
            return False
        return self._clock() < family.due(Work.LOSSES) or self._sync_family(Work.LOSSES, family)

    def _sync_family(self, step: Work, family: FamilyController) -> bool:
        succeeded = family.sync(step, self._cluster, self._node, self._api_servers)
        if succeeded and family.family is Family.IPV4 and not self._in_sync:
            route_loopback(self._config)  # after the sync, which writes the guard
        return succeeded


def _rule_facts(node: Node | None) -> tuple[object, ...] | None:
    """Return what rules depend on; taints, for example, concern health only."""
    return (node.addresses, node.pod_cidrs, node.zone) if node else None
