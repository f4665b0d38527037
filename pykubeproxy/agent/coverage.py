"""Which Services a sync covers and which wait, so that the changes of one namespace do not delay the others."""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping

import msgspec

from pykubeproxy.agent.quarantine import Quarantine
from pykubeproxy.agent.work import Waiting, Work
from pykubeproxy.objects import Family, Key
from pykubeproxy.rules import names
from pykubeproxy.rules.applied import AppliedState
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.digests import AppliedPort, DesiredPort, KeptPort
from pykubeproxy.rules.options import LARGE_CLUSTER_ENDPOINTS
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import reject_service
from pykubeproxy.services.cluster import Cluster, families_of
from pykubeproxy.services.ports import PortName, ServiceSkipReason, cluster_ip, whole_service
from pykubeproxy.services.selection import ResolvedPort
from pykubeproxy.services.size import Oversized, count_pairs, exposure, oversized

# The cost of the changed Services that one sync goes through: more take long enough for others to notice. A Service that
# costs more is large.
LARGE_PAIRS = 5000
# A port with more pairs to write in its turn writes only so many of its chains of endpoints and groups, then takes another.
PORT_PAIRS = 5000
# How many unused chains one sync deletes, if it does not write more; on legacy all, because any change replaces the whole
# table.
MOST_DELETED = 5000
# How many times more pairs a turn has on legacy, for the same reason. Beside 60,000 pairs, a commit takes 1.0 s, that of
# a turn 0.4 s more; with 20,000 pairs, 0.8 s more.
LEGACY_FACTOR = 2
# Do not remember what Services with fewer endpoints expose: looking at their rules takes no longer.
_FEW_ENDPOINTS = 500


def decide(
    work: Work,
    cluster: Cluster,
    applied: AppliedState,
    context: RuleContext,
    live: Ruleset | None,
    quarantined: Iterable[PortName],
    ports: Iterable[PortName],
    first: bool,
) -> tuple[set[Key], set[Key]]:
    """Return the Services of which a sync renders all ports, and those that wait.

    It goes through the dirty Services and those of waiting `ports`. A full sync, which has read the `live` tables, goes
    through all Services of the family. `first`: no sync has succeeded yet.
    """
    keys = work.dirty | {name.service_key for name in ports}
    if live is not None:
        held = {name.service_key for name in quarantined}
        family = context.options.family
        present = {service.key for service in cluster.services() if family in families_of(service)}
        keys |= present | held | set(applied.services()) | work.deferred.keys()
    # The first list and later ones bring all changes at once.
    changed: Collection[Key] = () if first or work.listed else work.dirty
    settled = keys - (set() if work.broken_off else work.drifted)
    waiting = must_wait(cluster, settled, changed, work.deferred.keys(), context)
    if live is not None and not work.broken_off:
        waiting -= {key for key in waiting if _is_damaged(cluster, applied, key, live, first)}
    return keys - waiting, waiting


def _is_damaged(cluster: Cluster, applied: AppliedState, service: Key, live: Ruleset, first: bool) -> bool:
    """Return whether chains of a Service are missing, or its rules are unknown after a start."""
    if applied.ports(service):
        return applied.misses_chains(service)
    return first and has_rules(live, cluster, service)


def must_wait(
    cluster: Cluster,
    keys: Collection[Key],
    changed: Container[Key],
    deferred: Container[Key],
    context: RuleContext,
) -> set[Key]:
    """Return the Services that wait for a turn: deferred ones, large ones, and the largest of many changed ones.

    All namespaces get about the same number of pairs, so one with few changes does not wait. Nor do Services that are not
    served.
    """
    family, limit = context.options.family, context.max_service_pairs
    waiting: set[Key] = set()
    used: Counter[str] = Counter()
    totals = []
    for pairs, key in sorted((_cost(cluster, key, family), key) for key in keys):
        counted = pairs if key in changed and key not in deferred else 0
        used[key.namespace] += counted
        totals.append((used[key.namespace] if counted else pairs, key, counted))
    left = LARGE_PAIRS
    for total, key, counted in sorted(totals):
        if key not in deferred and total <= LARGE_PAIRS and counted <= left:
            left -= counted
        elif not oversized(cluster, key, family, limit) and _is_served(cluster, key, context):
            waiting.add(key)
    return waiting


def next_turn(cluster: Cluster, waiting: Waiting, context: RuleContext, limit: int) -> frozenset[PortName]:
    """Return the waiting ports whose turn is next: at least one, up to about `limit` pairs.

    They are of the namespace that comes first, and as many whole Services of those that follow as fit.
    """
    turn: list[PortName] = []
    left = float(limit)
    order = {namespace: n for n, namespace in enumerate(dict.fromkeys(key.namespace for key in waiting))}
    for key in sorted(waiting, key=lambda key: order[key.namespace]):
        ports, service = waiting[key], cluster.service(key)
        count = len(service.ports) if service else 0
        each = _cost(cluster, key, context.options.family) / max(1, count)
        if turn and key.namespace != turn[0].namespace and left < each * len(ports):
            break
        for name in ports:
            if turn and left < each:
                return frozenset(turn)
            turn.append(name)
            left -= each
    return frozenset(turn)


def port_names(cluster: Cluster, service: Key) -> list[PortName]:
    """Return the names of the ports of a Service; none if there is no such Service."""
    found = cluster.service(service)
    return [PortName(*service, port.name, port.protocol.value) for port in found.ports] if found else []


def has_rules(live: Ruleset, cluster: Cluster, service: Key) -> bool:
    """Return whether the tables hold rules of a Service that an earlier agent wrote, maybe for other ports."""
    chains = (
        chain
        for port in port_names(cluster, service)
        for chain in (names.cluster_chain(port), names.local_chain(port))
    )
    if any(ChainKey("nat", chain) in live.chains for chain in chains):
        return True
    comments = f'"{service}:', f'"{service} '
    return any(comment in rule for rules in live.chains.values() for rule in rules for comment in comments)


def _cost(cluster: Cluster, key: Key, family: Family) -> int:
    """Return the pairs of a Service, and half a pair for the chain of each port: it may have but one endpoint."""
    service = cluster.service(key)
    return count_pairs(cluster, key, family) + (len(service.ports) // 2 if service else 0)


def _is_served(cluster: Cluster, key: Key, context: RuleContext) -> bool:
    service = cluster.service(key)
    if service is None:
        return False
    return not isinstance(cluster_ip(service, context.options.family), ServiceSkipReason)


class Exposures:
    """What the applied rules of the ports of larger Services expose at most: see `exposure`."""

    def __init__(self, family: Family) -> None:
        self._family = family
        # Ports that were synced together share what they expose.
        self._of: dict[PortName, array[int]] = {}

    def lost(self, cluster: Cluster, service: Key, ports: Collection[PortName]) -> list[PortName]:
        """Return those of these ports of a Service whose rules expose what it has lost, or may have lost."""
        now = exposure(cluster, service, self._family)
        exposed = {id(known): known for name in ports if (known := self._of.get(name)) is not None}
        fine = {number for number, known in exposed.items() if now.issuperset(known)}
        return [name for name in ports if id(self._of.get(name)) not in fine]

    def record(self, cluster: Cluster, resolution: "Resolution", applied: AppliedState) -> None:
        """Record what the ports of a resolution expose once they are applied."""
        for key, ports in resolution.services.items():
            is_large = sum(port.endpoints for port in applied.ports(key)) >= _FEW_ENDPOINTS
            now = exposure(cluster, key, self._family) if is_large else frozenset[int]()
            shared: dict[int, array[int]] = {}
            for name in (port.port.name for port in ports):
                before = self._of.pop(name, None)
                if is_large:
                    before = before if name in resolution.reduced else None
                    if id(before) not in shared:
                        found = now if before is None else now.intersection(before)
                        shared[id(before)] = array("q", found)
                    self._of[name] = shared[id(before)]

    def forget(self, ports: Iterable[PortName]) -> None:
        """Forget what these ports expose."""
        for name in ports:
            self._of.pop(name, None)


class Resolution(msgspec.Struct, frozen=True):
    """The ports of the Services to render, by name, and the context of their rules.

    `oversized` are those of the Services that are too large to be served; they have no ports here. Nor have `kept` ports,
    which stay as they are. `reduced` ports have only endpoints whose chains exist.
    """

    services: Mapping[Key, tuple[ResolvedPort, ...]]
    oversized: Mapping[Key, Oversized]
    kept: frozenset[PortName]
    reduced: frozenset[PortName]
    context: RuleContext

    def ports(self) -> tuple[ResolvedPort, ...]:
        """Return the service ports to render."""
        return tuple(port for ports in self.services.values() for port in ports)

    def desired(
        self, quarantine: Quarantine, applied: AppliedState, ahead: Mapping[PortName, AppliedPort]
    ) -> dict[Key, tuple[DesiredPort | KeptPort, ...]]:
        """Return the rules of all service ports, or what replaces them in quarantine.

        The own chains of ports `ahead` are written already.
        """
        options = self.context.options
        desired: dict[Key, tuple[DesiredPort | KeptPort, ...]] = {}
        for key, ports in self.services.items():
            found: dict[PortName, DesiredPort | KeptPort] = {
                port.name: KeptPort(port) for port in applied.ports(key) if port.name in self.kept
            }
            for port in ports:
                name, endpoints = port.port.name, len(port.selection.verdicts)
                if name in ahead:
                    found[name] = KeptPort(ahead[name])
                    continue
                found[name] = DesiredPort(
                    name, quarantine.rules_or_replacement(port, options), endpoints, name in self.reduced
                )
            desired[key] = tuple(found[name] for name in sorted(found))
        for key, large in self.oversized.items():
            rules = reject_service(key, large.cluster_ip, options)
            desired[key] = (DesiredPort(whole_service(key), rules, 0),)
        return desired

    def gone(self, applied: AppliedState) -> tuple[PortName, ...]:
        """Return the service ports that had rules and no longer exist."""
        names = {port.port.name for port in self.ports()} | self.kept
        names |= set(map(whole_service, self.oversized))
        return tuple(
            port.name for key in self.services for port in applied.ports(key) if port.name not in names
        )


def resolve(
    cluster: Cluster,
    keys: Collection[Key],
    applied: AppliedState,
    context: RuleContext,
    portions: Mapping[Key, Mapping[PortName, Container[str] | None]],
    each: Callable[[tuple[ResolvedPort, ...]], None] = lambda _: None,
) -> Resolution:
    """Resolve these Services. Set the option `large_cluster` by the number of all endpoints.

    Of a Service in `portions`, only the given ports are rendered. Those with chains may use only these endpoint chains.
    Call `each` with the ports of each Service.
    """
    services: dict[Key, tuple[ResolvedPort, ...]] = {}
    too_large: dict[Key, Oversized] = {}
    kept: set[PortName] = set()
    reduced: set[PortName] = set()
    for key in keys:
        portion = portions.get(key)
        found = context.resolve(cluster, key, portion)
        if isinstance(found, Oversized):
            services[key], too_large[key] = (), found
        else:
            services[key] = _by_name(found)
        if portion is not None:
            kept.update(name for name in port_names(cluster, key) if name not in portion)
            chains = {name: chains for name, chains in portion.items() if chains is not None}
            reduced |= chains.keys()
            services[key] = tuple(_reduced(services[key], applied.ports(key), chains))
        each(services[key])
    before = sum(port.endpoints for key in keys for port in applied.ports(key) if port.name not in kept)
    now = sum(len(port.selection.verdicts) for ports in services.values() for port in ports)
    large = applied.endpoints() - before + now > LARGE_CLUSTER_ENDPOINTS
    context = msgspec.structs.replace(
        context, options=msgspec.structs.replace(context.options, large_cluster=large)
    )
    return Resolution(services, too_large, frozenset(kept), frozenset(reduced), context)


def resolve_service(cluster: Cluster, service: Key, context: RuleContext) -> tuple[ResolvedPort, ...]:
    """Return the ports of one Service, by name; none if it is oversized."""
    found = context.resolve(cluster, service)
    return () if isinstance(found, Oversized) else _by_name(found)


def _reduced(
    ports: Iterable[ResolvedPort], applied: Iterable[AppliedPort], allowed: Mapping[PortName, Container[str]]
) -> Iterator[ResolvedPort]:
    """Yield ports; those in `allowed` with only the endpoints that have one of these chains, or not if new without any."""
    known = {port.name for port in applied}
    for resolved in ports:
        name, selection = resolved.port.name, resolved.selection
        if name not in allowed:
            yield resolved
            continue
        chains = allowed[name]
        kept = {
            endpoint.target
            for endpoint in selection.reachable
            if names.endpoint_chain(name, endpoint.target) in chains
        }
        if kept or name in known:
            used = {endpoint.target for endpoint in selection.reachable}
            smaller = msgspec.structs.replace(
                selection,
                cluster=tuple(endpoint for endpoint in selection.cluster if endpoint.target in kept),
                local=tuple(endpoint for endpoint in selection.local if endpoint.target in kept),
                reachable=tuple(endpoint for endpoint in selection.reachable if endpoint.target in kept),
                any_usable=selection.any_usable and bool(kept or not used),
                verdicts=tuple(
                    verdict
                    for verdict in selection.verdicts
                    if verdict.endpoint.target not in used or verdict.endpoint.target in kept
                ),
            )
            yield msgspec.structs.replace(resolved, selection=smaller)


def _by_name(ports: Iterable[ResolvedPort]) -> tuple[ResolvedPort, ...]:
    """Sort ports by name. A manifest may use a name twice: the last one counts, as in `render`."""
    named = {port.port.name: port for port in ports}
    return tuple(named[name] for name in sorted(named))
