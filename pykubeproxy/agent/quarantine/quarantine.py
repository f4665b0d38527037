"""Quarantine service ports whose rules iptables rejects, so that all others are served."""

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

import msgspec

from pykubeproxy.agent.quarantine.bisect import Bisection, may_blame_service
from pykubeproxy.agent.quarantine.quarantined import Quarantined
from pykubeproxy.kernel import KernelError, Rejected, Tables
from pykubeproxy.objects import Key
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.service import PortRules, note_rules, port_rules, reject_rules
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.selection import ResolvedPort

# How long a search may take, in seconds: legacy replaces the whole table for each try. The next failed sync continues the
# search. A retry of quarantined ports takes less time, since all other services wait for it.
SEARCH_SECONDS = 60.0
RETRY_SECONDS = 10.0
# If this many samples of a kind are all rejected, quarantine the whole kind.
_SAMPLES = 10
# On legacy, a concurrent writer that takes no lock causes rejections without a reason. So confirm up to _FEW rejected
# ports by _CONFIRMATIONS further tries.
_FEW, _CONFIRMATIONS = 20, 2


class Quarantine:
    """The quarantined service ports of one family, and the rules written in their place.

    The reconcile loop owns it. It calls `progress` during a search, which may take a minute.
    """

    def __init__(self, tables: Tables, chains_per_block: int | None) -> None:
        self._tables = tables
        self._limit = chains_per_block
        self._quarantined: Mapping[PortName, Quarantined] = {}
        self.progress: Callable[[], None] = lambda: None

    def all(self) -> tuple[Quarantined, ...]:
        """Return all quarantined ports, by name."""
        return tuple(self._quarantined[name] for name in sorted(self._quarantined))

    def rules(self, port: ResolvedPort, options: RuleOptions) -> PortRules:
        """Return the rules of a service port, or those that replace them in quarantine."""
        quarantined = self._quarantined.get(port.port.name)
        if quarantined is None:
            return _rules(port, options)
        return reject_rules(port.port, options) if quarantined.rejects_clients else note_rules(port.port)

    def retry(self, services: Mapping[Key, Collection[ResolvedPort]], options: RuleOptions) -> None:
        """Release the ports of these Services whose rules iptables accepts now; drop ports that no longer exist.

        Raises KernelError.
        """
        if not self._quarantined:
            return
        ports = {port.port.name: port for resolved in services.values() for port in resolved}
        retried = {name: _rules(ports[name], options) for name in self._quarantined if name in ports}
        bisection = self._bisection(options, RETRY_SECONDS)
        accepted, rejected = bisection.split(retried)
        self._quarantined = {
            name: msgspec.structs.replace(port, reason=rejected.get(name, port.reason))
            for name, port in self._quarantined.items()
            if name not in accepted and (name in retried or name.service_key not in services)
        }
        if retried:
            bisection.clear()

    def isolate(self, failure: KernelError, resolved: Iterable[ResolvedPort], options: RuleOptions) -> bool:
        """Quarantine the ports that made a restore of these service ports fail. Return whether there were any.

        Do not blame services for a fault of the node: if iptables rejects even an ordinary service, quarantine none.
        Raises KernelError.
        """
        if not isinstance(failure, Rejected):
            return False
        ports = {port.port.name: port for port in resolved if port.port.name not in self._quarantined}
        rules = {name: _rules(port, options) for name, port in ports.items()}
        if not may_blame_service(failure, rules):
            return False
        bisection = self._bisection(options, SEARCH_SECONDS)
        if not bisection.accepts_plain_service():
            return False
        rejected: Mapping[PortName, str] = _rejected_by_kind(bisection, ports, rules)
        rejected = rejected or bisection.split(rules).rejected
        if failure.whole_block and len(rejected) <= _FEW:
            for _ in range(_CONFIRMATIONS):
                rejected = bisection.split({name: rules[name] for name in rejected}).rejected
        # The node may have failed during the search.
        if rejected and not bisection.accepts_plain_service():
            return False
        rejectable = {name: reject_rules(ports[name].port, options) for name in rejected}
        rejects_clients = bisection.split(rejectable).accepted
        bisection.clear()
        family, now = self._tables.family, time.time()
        self._quarantined = {
            **self._quarantined,
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
        *(port.internal_local, port.external_local, bool(port.health_check_node_port)),
        *(selection.any_usable, bool(selection.cluster), bool(selection.local)),
        len(selection.reachable) > 1,
    )
