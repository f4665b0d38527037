"""Service ports whose rules iptables refuses are set aside, so that all others are served."""

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

import msgspec

from pykubeproxy.agent.quarantine.bisect import Trials, is_about_services
from pykubeproxy.kernel import KernelError, Refused, Tables
from pykubeproxy.objects import Key
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.service import PortRules, note_rules, port_rules, refusing_rules
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.resolve import ResolvedPort

# How long it may take to tell those that are refused from all others, in seconds: legacy replaces the whole table for
# each try. What is not found is looked for when the sync fails again. Those that are set aside keep others waiting less.
PATIENCE = 60.0
PATIENCE_AGAIN = 10.0
# Of a kind of which so many of all parts are refused, all are taken to be. Of fewer than twice as many each is tried.
_SAMPLES = 10
# Others who write to a table of legacy without its lock make it refuse anything, without a reason: so few are tried so
# many times more, all at once first.
_FEW, _CONFIRMATIONS = 20, 2


class Quarantined(msgspec.Struct, frozen=True):
    """A service port that is set aside: iptables' words, and since when, in seconds since 1970.

    `refuses`: new clients are refused; else not even a rule for that can be written.
    """

    name: PortName
    why: str
    since: float
    refuses: bool = True


class Quarantine:
    """Those of one family, and what is written for each. For one thread.

    `progress` is called every now and then while service ports are tried, which may take a minute and more.
    """

    def __init__(self, tables: Tables, chains_per_block: int | None) -> None:
        self._tables = tables
        self._limit = chains_per_block
        self._aside: Mapping[PortName, Quarantined] = {}
        self.progress: Callable[[], None] = lambda: None

    def all(self) -> tuple[Quarantined, ...]:
        """All that are set aside, by name."""
        return tuple(self._aside[name] for name in sorted(self._aside))

    def rules(self, item: ResolvedPort, options: RuleOptions) -> PortRules:
        """The rules of a service port, or those that take their place."""
        aside = self._aside.get(item.port.name)
        if aside is None:
            return port_rules(item.port, item.selection, options)
        return refusing_rules(item.port, options) if aside.refuses else note_rules(item.port)

    def try_again(self, served: Mapping[Key, Collection[ResolvedPort]], options: RuleOptions) -> None:
        """Take up those of the Services that were looked at whose rules are taken now; forget those that are gone.

        Raises KernelError.
        """
        if not self._aside:
            return
        items = {item.port.name: item for of in served.values() for item in of}
        tried = {name: self._wanted(items[name], options) for name in self._aside if name in items}
        trials = self._trials(options, PATIENCE_AGAIN)
        taken, refused = trials.sort(tried)
        self._aside = {
            name: msgspec.structs.replace(aside, why=refused.get(name, aside.why))
            for name, aside in self._aside.items()
            if name not in taken and (name in tried or name.service_key not in served)
        }
        if tried:
            trials.clear()

    def narrow(self, failure: KernelError, items: Iterable[ResolvedPort], options: RuleOptions) -> bool:
        """After a restore for these service ports has failed: set aside those that were the reason.

        Returns whether there were any. Where iptables takes no service's rules at all it is the node that has a fault,
        and none is set aside. Raises KernelError.
        """
        if not isinstance(failure, Refused):
            return False
        served = {item.port.name: item for item in items if item.port.name not in self._aside}
        wanted = {name: self._wanted(item, options) for name, item in served.items()}
        if not is_about_services(failure, wanted):
            return False
        trials = self._trials(options, PATIENCE)
        if not trials.takes_plain_service():
            return False
        refused = _refused_by_kind(trials, served, wanted) or trials.sort(wanted).refused
        if failure.whole_block and len(refused) <= _FEW:
            for _ in range(_CONFIRMATIONS):
                refused = trials.sort({name: wanted[name] for name in refused}).refused
        # A fault that came meanwhile is not to be laid at services' door.
        if refused and not trials.takes_plain_service():
            return False
        refusable = trials.sort({name: refusing_rules(served[name].port, options) for name in refused}).taken
        trials.clear()
        now = time.time()
        found = {name: Quarantined(name, why, now, name in refusable) for name, why in refused.items()}
        self._aside = {**self._aside, **found}
        return bool(found)

    def _wanted(self, item: ResolvedPort, options: RuleOptions) -> PortRules:
        return port_rules(item.port, item.selection, options)

    def _trials(self, options: RuleOptions, patience: float) -> Trials:
        return Trials(self._tables, options, self._limit, patience, self.progress)


def _refused_by_kind(
    trials: Trials, served: Mapping[PortName, ResolvedPort], wanted: Mapping[PortName, PortRules]
) -> dict[PortName, str]:
    """Service ports of kinds that the kernel cannot do, judged by a few of each, and whoever of those few is refused.

    What the kernel lacks it lacks for all of a kind, and there are few kinds: to try some of each takes a moment, where
    hundreds of services in a table of legacy take minutes to tell from thousands.
    """
    kinds: dict[Hashable, list[PortName]] = {}
    for name, item in served.items():
        kinds.setdefault(_kind(item), []).append(name)
    samples = {kind: names[:: max(1, len(names) // _SAMPLES)] for kind, names in kinds.items()}
    refused = dict(trials.sort({name: wanted[name] for some in samples.values() for name in some}).refused)
    for kind, some in samples.items():
        if all(name in refused for name in some):
            refused.update({name: refused.get(name, refused[some[0]]) for name in kinds[kind]})
    return refused


def _kind(item: ResolvedPort) -> Hashable:
    """What decides which matches and targets the rules of a service port use."""
    port, selection = item.port, item.selection
    return (
        port.protocol,
        port.affinity_seconds is not None,
        *map(bool, (port.node_port, port.external_ips, port.load_balancer_ips, port.source_ranges)),
        *(port.internal_local, port.external_local, bool(port.health_check_node_port)),
        *(selection.any_usable, bool(selection.cluster), bool(selection.local)),
        len(selection.reachable) > 1,
    )
