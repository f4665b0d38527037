"""The pending work of one family: which Services may need other rules, and which of them a sync takes first.

The changes of one namespace must not delay those of others. So a sync goes through Services up to a budget, the smallest
first, all namespaces alike; the service ports of the others wait for a turn. Only what a waiting Service has lost goes at
once, so that no packet meets it any more.
"""

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from pykubeproxy.agent.turns import Turns
from pykubeproxy.agent.wanted import Wanted
from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Key
from pykubeproxy.rules.drift import Drift
from pykubeproxy.services.ports import PortName


class Work(enum.Enum):
    """What the loop may do next for a family.

    CHANGES: sync the Services that have changed, except those that must wait, and repair drift. LOSSES: sync what waiting
    ports have lost. TURN: sync the waiting ports whose turn it is, and delete some unused chains. TRY: write the rules of
    suspect and quarantined ports.
    """

    CHANGES = "changes"
    LOSSES = "losses"
    TURN = "turn"
    TRY = "try"


class Budget(NamedTuple):
    """How much one sync does, in pairs: see `count_pairs`.

    - `changes`: of the Services that have changed; one with more is large. More take long enough for others to notice
    - `turn`: of the waiting ports whose turn it is, or that have lost something
    - `portion`: of a port with more in its own turn; the chains of its other endpoints come in later turns
    - `deleted`: of unused chains, unless it writes more
    """

    changes: int = 5000
    turn: int = 5000
    portion: int = 5000
    deleted: int = 5000

    @classmethod
    def of(cls, backend: Backend) -> "Budget":
        """Return the budget for a backend.

        On legacy any change replaces the whole table. Beside 60,000 pairs, a commit takes 1.0 s, that of a turn 0.4 s
        more; with 20,000 pairs, 0.8 s more.
        """
        return cls() if backend is Backend.NFT else cls(turn=10_000, portion=10_000)


class Batch(NamedTuple):
    """The Services of which a sync renders all ports, in this order, with their costs, and those that wait."""

    whole: Mapping[Key, int]
    waiting: Collection[Key]


class Pending:
    """The pending work of one family. The reconcile loop owns it.

    - `all_services`: the next sync goes through all Services
    - `drift`: what it repairs, if a check has found something
    - `deferred`: the ports that wait for their turn
    - `losing`: those of them that must lose something before
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.all_services = True
        self.drift: Drift | None = None
        self.deferred, self.losing = Turns(), Turns()
        # Until a sync succeeds: the Services that may need other rules, and whether they may have lost something.
        self._changed: dict[Key, bool] = {}
        # Those of them with drift do not wait, and only large ones do if a list brought the changes.
        self._drifted: set[Key] = set()
        self._listed = False
        # After a failed turn, the next one takes one port, so that a port that fails delays no others.
        self._alone = False

    @property
    def has_changes(self) -> bool:
        """Return whether a sync is needed at once."""
        return self.all_services or bool(self._changed) or self.drift is not None

    @property
    def is_bulk(self) -> bool:
        """Return whether the next sync repairs drift or follows a list: it may delete all unused chains."""
        return self._listed or self.drift is not None

    # Mark.

    def changed(self, services: Mapping[Key, bool], listed: bool = False) -> None:
        """Have the next sync go through these Services, which may have lost something, or not. A list may bring them."""
        for key, loses in services.items():
            self._changed[key] = self._changed.get(key, False) or loses
        self._listed = self._listed or listed

    def mark(self, services: Collection[Key], drifted: bool = False) -> None:
        """Have the next sync go through these Services; `drifted`: other programs have changed their rules."""
        self.changed(dict.fromkeys(services, True))
        self._drifted.update(services if drifted else ())

    def wait(self, service: Key, ports: Collection[PortName], served: Collection[PortName]) -> bool:
        """Let these ports and those that have rules wait if the Service may have changed.

        Return whether it may have lost something.
        """
        loses = self._changed.get(service)
        if loses is not None or self.all_services:
            self.deferred.add(service, [*served, *ports])
        if loses:
            self.losing.add(service, served)
        return bool(loses)

    # Take.

    def next_turn(self, step: Work, wanted: Wanted) -> frozenset[PortName]:
        """Return the waiting ports that a step LOSSES or TURN takes: one if the last turn failed."""
        queue = self.losing if step is Work.LOSSES else self.deferred
        return queue.take(wanted, 0 if self._alone else self.budget.turn)

    def choose(
        self, wanted: Wanted, served: Iterable[Key], turn: Iterable[PortName], is_first: bool
    ) -> Batch:
        """Choose from the changed Services and those of waiting ports, or from all of the family and those `served` so far.

        `is_first`: no sync has succeeded yet.
        """
        keys = self._changed.keys() | {name.service_key for name in turn}
        if self.all_services:
            keys |= {*wanted.services(), *served, *self.deferred.services()}
        costs = {key: wanted.cost(key) for key in keys}
        # The first list and later ones bring all changes at once.
        free = keys if is_first or self._listed else keys - self._changed.keys()
        many = self._too_many({key: costs[key] for key in keys - self._drifted}, free)
        waiting = {key for key in many if wanted.is_served(key)}
        ordered = sorted((cost, key) for key, cost in costs.items() if key not in waiting)
        return Batch({key: cost for cost, key in ordered}, waiting)

    def _too_many(self, costs: Mapping[Key, int], free: Collection[Key]) -> set[Key]:
        """Return the Services that wait already, large ones, and the largest of many others, except those that are `free`.

        All namespaces get about the same number of pairs, so one with few changes does not wait.
        """
        most = left = self.budget.changes
        too_many = self.deferred.services() & costs.keys()
        too_many |= {key for key, pairs in costs.items() if pairs > most}
        used: Counter[str] = Counter()
        totals = []
        for pairs, key in sorted((costs[key], key) for key in costs.keys() - free - too_many):
            used[key.namespace] += pairs
            totals.append((used[key.namespace], key, pairs))
        for total, key, pairs in sorted(totals):
            if total <= most and pairs <= left:
                left -= pairs
            else:
                too_many.add(key)
        return too_many

    # Record.

    def written(
        self, services: Collection[Key], deferred: Collection[PortName], losing: Collection[PortName]
    ) -> None:
        """Record that these Services have their rules, except for ports that must still wait."""
        self.losing.keep(services, losing)
        self.deferred.keep(services, deferred)

    def done(self, step: Work) -> None:
        """Record a sync that succeeded."""
        self._alone = self._alone and step is Work.CHANGES
        self.drift, self._listed, self.all_services = None, False, False
        self._changed.clear()
        self._drifted.clear()

    def failed(self, step: Work) -> None:
        """Record a sync that failed. From now on, Services with drift wait, too."""
        self._alone = self._alone or step is not Work.CHANGES
        self._drifted.clear()
