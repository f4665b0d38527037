"""Quarantine service ports whose rules iptables rejects, and Services that are too large, so that all others are served."""

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

import msgspec

from pykubeproxy.agent.quarantine.bisect import Bisection, Split, may_blame_service
from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.kernel import KernelError, Rejected, Tables, TimedOut
from pykubeproxy.objects import Key
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.service import PortRules, note_rules, port_rules, reject_rules
from pykubeproxy.services.ports import PortName, whole_service
from pykubeproxy.services.selection import ResolvedPort
from pykubeproxy.services.size import Oversized

# How long a search may take, in seconds: legacy replaces the whole table for each try. The next failed sync continues the
# search. A retry of quarantined ports takes less time, since all other services wait for it.
SEARCH_SECONDS = 60.0
RETRY_SECONDS = 1.0
# If this many samples of a kind are all rejected, quarantine the whole kind.
_SAMPLES = 10
# A concurrent writer causes rejections: on legacy without a reason, if it takes no lock; on nft, if it deletes the chains
# of a port between two blocks. So confirm up to _FEW rejected ports by _CONFIRMATIONS further tries.
_FEW, _CONFIRMATIONS = 20, 2


class Quarantine:
    """The quarantined service ports and Services of one family, and the rules written in place of the ports.

    The reconcile loop owns it. It calls `progress` during a search, which may take a minute.
    """

    def __init__(self, tables: Tables, chains_per_block: int | None) -> None:
        self._tables = tables
        self._limit = chains_per_block
        self._rejected: Mapping[PortName, Quarantined] = {}
        self._oversized: Mapping[PortName, Quarantined] = {}
        self.progress: Callable[[], None] = lambda: None

    def all(self) -> tuple[Quarantined, ...]:
        """Return all quarantined ports and Services, by name."""
        both = {**self._rejected, **self._oversized}
        return tuple(both[name] for name in sorted(both))

    def rejected(self) -> Collection[PortName]:
        """Return the ports whose rules iptables rejects."""
        return self._rejected.keys()

    def rules(self, port: ResolvedPort, options: RuleOptions) -> PortRules:
        """Return the rules of a service port, or those that replace them in quarantine."""
        quarantined = self._rejected.get(port.port.name)
        if quarantined is None:
            return _rules(port, options)
        return reject_rules(port.port, options) if quarantined.rejects_clients else note_rules(port.port)

    def resolved(
        self, services: Mapping[Key, Collection[ResolvedPort]], oversized: Mapping[Key, Oversized]
    ) -> None:
        """Release the ports of these Services that no longer exist, and note which Services are too large."""
        names = {port.port.name for ports in services.values() for port in ports}
        self._rejected = {
            name: port
            for name, port in self._rejected.items()
            if name in names or name.service_key not in services
        }
        kept = {name: port for name, port in self._oversized.items() if name.service_key not in services}
        family, now = self._tables.family, time.time()
        for service, it in oversized.items():
            name = whole_service(service)
            since = self._oversized[name].since if name in self._oversized else now
            reason = f"it has {it.pairs} pairs of a port and an endpoint or address, more than maxServicePairs, {it.limit}"
            kept[name] = Quarantined.from_port(family, name, reason, since)
        self._oversized = kept

    def retry(self, ports: Iterable[ResolvedPort], options: RuleOptions) -> Split:
        """Try quarantined ports again, the first ones first; release those whose rules iptables accepts now.

        The returned value tells which of them were tried. Raises KernelError.
        """
        rules = {port.port.name: _rules(port, options) for port in ports}
        if not rules:
            return Split(frozenset(), {})
        bisection = self._bisection(options, RETRY_SECONDS)
        split = bisection.split(rules)
        self._rejected = {
            name: msgspec.structs.replace(port, reason=split.rejected.get(name, port.reason))
            for name, port in self._rejected.items()
            if name not in split.accepted
        }
        bisection.clear()
        return split

    def isolate(self, failure: KernelError, resolved: Iterable[ResolvedPort], options: RuleOptions) -> bool:
        """Quarantine the ports that made a restore of these service ports fail. Return whether there were any.

        Do not blame services for a fault of the node: if iptables rejects even an ordinary service, or hangs with it,
        quarantine none. Raises KernelError.
        """
        if not isinstance(failure, Rejected | TimedOut):
            return False
        ports = {port.port.name: port for port in resolved if port.port.name not in self._rejected}
        # The largest first: they are the likely reason for a timeout.
        ordered = sorted(ports.items(), key=lambda item: (-len(item[1].selection.verdicts), item[0]))
        rules = {name: _rules(port, options) for name, port in ordered}
        if isinstance(failure, Rejected) and not may_blame_service(failure, rules):
            return False
        bisection = self._bisection(options, SEARCH_SECONDS)
        if not bisection.accepts_plain_service():
            return False
        rejected: Mapping[PortName, str] = {}
        if isinstance(failure, Rejected):
            rejected = _rejected_by_kind(bisection, ports, rules)
        rejected = rejected or bisection.split(rules).rejected
        if len(rejected) <= _FEW:
            for _ in range(_CONFIRMATIONS):
                rejected = bisection.split({name: rules[name] for name in rejected}).rejected
        # The node may have failed during the search.
        if rejected and not bisection.accepts_plain_service():
            return False
        rejectable = {name: reject_rules(ports[name].port, options) for name in rejected}
        rejects_clients = bisection.split(rejectable).accepted
        bisection.clear()
        family, now = self._tables.family, time.time()
        self._rejected = {
            **self._rejected,
            **{
                name: Quarantined.from_port(family, name, reason, now, name in rejects_clients)
                for name, reason in rejected.items()
            },
        }
        return bool(rejected)

    def _bisection(self, options: RuleOptions, seconds: float) -> Bisection:
        return Bisection(self._tables, options, self._limit, seconds, self.progress)


def _rules(port: ResolvedPort, options: RuleOptions) -> PortRules:
    return port_rules(port.port, port.selection, options)


def _rejected_by_kind(
    bisection: Bisection, ports: Mapping[PortName, ResolvedPort], rules: Mapping[PortName, PortRules]
) -> dict[PortName, str]:
    """Return the ports of kinds whose samples are all rejected, and other rejected samples.

    A missing kernel feature affects a whole kind, and there are few kinds. Trying samples takes a moment; finding
    hundreds of ports among thousands takes minutes on legacy.
    """
    kinds: dict[Hashable, list[PortName]] = {}
    for name, port in ports.items():
        kinds.setdefault(_kind(port), []).append(name)
    samples = {kind: names[:: max(1, len(names) // _SAMPLES)] for kind, names in kinds.items()}
    rejected = dict(
        bisection.split({name: rules[name] for some in samples.values() for name in some}).rejected
    )
    for kind, some in samples.items():
        if all(name in rejected for name in some):
            rejected.update({name: rejected.get(name, rejected[some[0]]) for name in kinds[kind]})
    return rejected


def _kind(resolved: ResolvedPort) -> Hashable:
    """Return the properties that decide which matches and targets the rules of a service port use."""
    port, selection = resolved.port, resolved.selection
    return (
        port.protocol,
        port.affinity_seconds is not None,
        *map(bool, (port.node_port, port.external_ips, port.load_balancer_ips, port.source_ranges)),
        port.source_ranges is None,
        *(port.internal_local, port.external_local, bool(port.health_check_node_port)),
        *(selection.any_usable, bool(selection.cluster), bool(selection.local)),
        len(selection.reachable) > 1,
    )
