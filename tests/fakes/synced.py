"""A cluster, and tables of one family in memory that follow it: the world of the tests of syncs."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import cast

from pykubeproxy.agent.notices import SyncReport
from pykubeproxy.agent.pending import Budget, Work
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.agent.write import SyncFailed
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Failed, KernelError, Rejected, Tables
from pykubeproxy.objects import Event, Family, Node
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.digests import ABSENT, digest
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from tests.fakes.drift import scope
from tests.fakes.iptables import FakeIptables
from tests.strategies import NODE

_ALL = 1_000_000


NODE_IP = "192.168.99.10"


def flags_context(family: Family = Family.IPV4, nfacct: bool = True, /, **flags: object) -> RuleContext:
    """Return the context of rules for these flags; with `nfacct`, on a kernel with the counters."""
    named = {name.replace("_", "-"): str(value).lower() for name, value in flags.items()}
    here = Node(NODE, (NODE_IP,), (), "zone-a")
    return rule_context(load(None, named).config, NODE, here, KernelFacts((NODE_IP,), nfacct=nfacct), family)


class SyncedFamily:
    """A cluster and the tables of one family.

    `sync`, `lose` and `turn` raise what the agent raises. `round` and the functions after it go on, as the loop does.
    The tables are `live`, or fake ones. Writes fail after `blocks` blocks, and at a block with the chain `broken`;
    `after_block` is called after each other.
    """

    def __init__(
        self,
        *events: Event,
        context: RuleContext | None = None,
        backend: Backend = Backend.NFT,
        chains_per_block: int | None = _ALL,
        after_block: Callable[[FakeIptables], None] = lambda _: None,
        live: Tables | None = None,
        budget: Budget | None = None,
    ) -> None:
        family = live.family if live else Family.IPV4
        self.context = context or flags_context(family, live is None)
        self.cluster = Cluster()
        self.live = cast("FakeIptables", live) if live else FakeIptables(backend, self.context.options.family)
        self.blocks, self.broken = _ALL, ""
        self._chains_per_block = chains_per_block
        if chains_per_block == _ALL:
            self._chains_per_block = 200 if self.live.backend is Backend.NFT else None
        self._after_block = after_block
        self._budget = budget
        self._restore = self.live.restore
        self.restart()
        self.apply(*events)

    def restart(self) -> None:
        """Begin with an agent that knows nothing about the tables."""
        self.broken = ""
        self.tables = FamilyTables(self.live, self._chains_per_block, self._budget)

    def apply(self, *events: Event) -> None:
        """Change the cluster; the next sync follows."""
        for event in events:
            changes = self.cluster.apply(event)
            self.tables.pending.changed({key: change.loses for key, change in changes.items()})

    def sync(self, *events: Event, context: RuleContext | None = None) -> SyncReport:
        """Sync what has changed, after these events."""
        self.apply(*events)
        return self.tables.sync(self.cluster, context or self.context)

    def sync_and_retry(self, *events: Event) -> SyncReport:
        """Sync, then try what is suspect, and the changed ports that were quarantined."""
        changed = {key for event in events for key in self.cluster.apply(event)}
        self.tables.pending.mark(changed)
        due = [it.port_name for it in self.tables.quarantined() if it.port_name.service_key in changed]
        report = self.sync()
        self.tables.quarantine.retry(due)
        return self.try_all() or report

    def try_all(self) -> SyncReport | None:
        """Make all tries, and sync after those that need it. Return the last report."""
        report: SyncReport | None = None
        while self.tables.quarantine.has_tries:
            report = self.tables.try_next(self.cluster).report or report
            if self.tables.needs_sync:
                report = self.sync()
        return report

    def turn(self) -> SyncReport:
        return self.tables.sync(self.cluster, self.context, Work.TURN)

    def lose(self) -> SyncReport:
        return self.tables.sync(self.cluster, self.context, Work.LOSSES)

    def round(self, *events: Event) -> None:
        """Sync what has changed, then losses."""
        self._attempt(lambda: self.sync(*events))
        self.lose_if_due()

    def lose_if_due(self) -> None:
        if self.tables.pending.losing:
            self._attempt(self.lose)

    def turn_if_due(self) -> None:
        if self.tables.waiting:
            self._attempt(self.turn)

    def retry(self) -> None:
        """Retry all rejected ports."""
        self.tables.quarantine.retry(tuple(self.tables.quarantine.rejected()))
        self._attempt(self.try_all)

    def repair(self) -> None:
        """Check for drift, and sync."""
        self._attempt(lambda: self.tables.note_drift(scope()))
        self.round()

    def settle(self, turns: int = 40) -> None:
        """Sync, and take turns until nothing waits."""
        self.round()
        for _ in range(turns):
            self.lose_if_due()
            self.turn_if_due()
        assert not self.tables.waiting

    def fail_after(self, blocks: int, work: Callable[["SyncedFamily"], object]) -> None:
        """Let some work fail after some blocks."""
        self.blocks = blocks
        work(self)
        self.blocks = _ALL

    def write_block_by_block(self) -> None:
        """Apply each block on its own from now on, so that `blocks`, `broken` and `after_block` take effect."""
        self.live.restore = self._write  # type: ignore[method-assign]

    def fresh(self) -> "SyncedFamily":
        """Return what a first agent makes of the same cluster, with as few blocks as possible; sync it."""
        made = SyncedFamily(context=self.context, backend=self.live.backend, chains_per_block=None)
        made.cluster = self.cluster
        return made

    def check_known(self) -> None:
        """Assert that what the agent knows is what the tables hold, apart from what it knows to be uncertain."""
        known, live = self.tables._known, self.our_chains()
        if known.unread:
            return
        digests = dict(known.digests())
        found = {key: digest(key, rules) for key, rules in live.items() if key not in known.doubtful}
        held = {key: it for key, it in digests.items() if it != ABSENT}
        assert held == found, {key for key in {*held, *found} if held.get(key) != found.get(key)}
        if known.is_certain:
            of_table = Counter[str]()
            for key, rules in live.items():
                of_table[key.table] += len(rules)
            assert Counter(known.rule_counts()) == of_table
            assert known.chain_count() - list(digests.values()).count(ABSENT) == len(live)
        endpoints = sum(port.endpoints for key in known.services() for port in known.ports(key))
        assert known.endpoints() == endpoints

    def our_chains(self) -> dict[ChainKey, tuple[str, ...]]:
        return {key: rules for key, rules in self.chains().items() if is_ours(key)}

    def chains(self) -> dict[ChainKey, tuple[str, ...]]:
        return dict(self.live.save().chains)

    def targets(self) -> set[str]:
        """Return the endpoints that rules lead to."""
        rules = (rule for chain in self.chains().values() for rule in chain)
        return {rule.rpartition(" ")[2] for rule in rules if "-j DNAT" in rule}

    def _attempt(self, work: Callable[[], object]) -> None:
        with contextlib.suppress(KernelError, SyncFailed):
            work()

    def _write(self, text: str) -> None:
        lines = 0
        for block in filter(None, text.split("COMMIT\n")):
            written = f":{self.broken} " in block and f"-X {self.broken}\n" not in block
            if not self.blocks or (self.broken and written):
                raise Failed("iptables-restore", 1, "out of memory")
            self.blocks -= 1
            try:
                self._restore(f"{block}COMMIT\n")
            except Rejected as error:
                raise Rejected(
                    lines + error.line_number, error.line, error.message, error.exit_code
                ) from error
            lines += block.count("\n") + 1
            self._after_block(self.live)
