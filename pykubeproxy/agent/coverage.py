"""Which Services a sync covers and which wait, so that the changes of one namespace do not delay the others."""

from array import array
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping

import msgspec

from pykubeproxy.agent.quarantine import Quarantine
from pykubeproxy.agent.work import Waiting, Work
from pykubeproxy.objects import Family, Key
from pykubeproxy.rules import names
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.known import KnownPort, KnownTables
from pykubeproxy.rules.options import LARGE_CLUSTER_ENDPOINTS
from pykubeproxy.rules.plan import DesiredPort, DesiredService, is_written
from pykubeproxy.rules.service import port_rules, reject_service
from pykubeproxy.services.cluster import Cluster, families_of
from pykubeproxy.services.ports import PortName, ServiceSkipReason, cluster_ip, whole_service
from pykubeproxy.services.selection import ResolvedPort
from pykubeproxy.services.size import Oversized, count_endpoints, count_pairs, exposure, oversized

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
    served: Iterable[Key],
    context: RuleContext,
    quarantined: Iterable[PortName],
    ports: Iterable[PortName],
    is_first: bool,
) -> tuple[dict[Key, int], set[Key]]:
    """Return the Services of which a sync renders all ports, the smallest first, with their costs, and those that wait.

    It goes through the dirty Services and those of waiting `ports`, or through all of the family and those `served` so far.
    `is_first`: no sync has succeeded yet.
    """
    keys = work.dirty | {name.service_key for name in ports}
    family = context.options.family
    if work.visit_all:
        held = {name.service_key for name in quarantined}
        present = {service.key for service in cluster.services() if family in families_of(service)}
        keys |= present | held | set(served) | work.deferred.keys()
    # The first list and later ones bring all changes at once.
    changed: Collection[Key] = () if is_first or work.listed else work.dirty
    costs = {key: _cost(cluster, key, family) for key in keys}
    settled = {key: cost for key, cost in costs.items() if key not in work.drifted}
    waiting = must_wait(cluster, settled, changed, work.deferred.keys(), context)
    ordered = sorted((cost, key) for key, cost in costs.items() if key not in waiting)
    return {key: cost for cost, key in ordered}, waiting


def reserving_differently(cluster: Cluster, context: RuleContext, before: RuleContext) -> set[Key]:
    """Return the Services that claim an address and port that only one of two contexts reserves."""
    moved = {at for at, _ in context.reserved.items() ^ before.reserved.items()}
    return {
        service.key
        for service in (cluster.services() if moved else ())
        for ip in (*service.external_ips, *service.load_balancer_ips)
        for port in service.ports
        if (ip, port.port) in moved
    }


def is_large_cluster(known: KnownTables, cluster: Cluster, keys: Collection[Key], family: Family) -> bool:
    """Return whether a family has many endpoints once these Services are written: chains then omit most comments."""
    endpoints = known.endpoints() - sum(port.endpoints for key in keys for port in known.ports(key))
    for key in keys:
        endpoints += count_endpoints(cluster, key, family)
        if endpoints > LARGE_CLUSTER_ENDPOINTS:
            return True
    return False


def must_wait(
    cluster: Cluster,
    costs: Mapping[Key, int],
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
    for pairs, key in sorted((pairs, key) for key, pairs in costs.items()):
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

    def record(self, cluster: Cluster, resolution: "Resolution", known: KnownTables) -> None:
        """Record what the ports of a resolution expose once they are applied."""
        for key, ports in resolution.services.items():
            is_large = sum(port.endpoints for port in known.ports(key)) >= _FEW_ENDPOINTS
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


class Resolution:
    """Some Services, resolved one after the other while the chains of those before are written.

    `services` are the ports of those resolved so far, by name. `oversized` are those that are too large to be served; they
    have no ports here. Nor have `kept` and `held` ports, which stay as they are: they wait for their turn, or are suspect;
    `doubtful` are those that the quarantine does not know yet. `reduced` ports have only endpoints whose chains exist.
    """

    def __init__(
        self,
        cluster: Cluster,
        whole: Mapping[Key, int],
        portions: Mapping[Key, Mapping[PortName, Container[str] | None]],
        known: KnownTables,
        context: RuleContext,
        tried: frozenset[PortName] = frozenset(),
    ) -> None:
        """Prepare to resolve `whole` Services, which come with their costs, then the given ports of those in `portions`.

        These come with the endpoint chains that they may use; None means any. Ports that are `tried` get their own rules,
        whatever the quarantine says.
        """
        self.context = context
        self.services: dict[Key, tuple[ResolvedPort, ...]] = {}
        self.oversized: dict[Key, Oversized] = {}
        self.kept: set[PortName] = set()
        self.held: set[PortName] = set()
        self.doubtful: list[ResolvedPort] = []
        self.reduced: set[PortName] = set()
        self._cluster = cluster
        self._whole = whole
        self._known = known
        self._portions = portions
        self._tried = tried

    def ports(self) -> tuple[ResolvedPort, ...]:
        """Return the service ports resolved so far."""
        return tuple(port for ports in self.services.values() for port in ports)

    def desired(self, quarantine: Quarantine) -> Iterator[DesiredService]:
        """Resolve each Service, and yield its rules, or what replaces them in quarantine."""
        options = self.context.options
        most = self.context.max_service_pairs
        held = quarantine.held() - self._tried
        known = held | self._tried
        for key in (*self._whole, *self._portions):
            portion = self._portions.get(key)
            is_small = key in self._whole and self._whole[key] <= most
            found = self.context.resolve(self._cluster, key, portion, is_small)
            stay: set[PortName] = set()
            if isinstance(found, Oversized):
                self.services[key], self.oversized[key] = (), found
                rules = reject_service(key, found.cluster_ip, options)
                yield DesiredService(key, (DesiredPort(whole_service(key), rules, 0),))
                continue
            ports = _by_name(found)
            if portion is not None:
                stay = {name for name in port_names(self._cluster, key) if name not in portion}
                chains = {name: chains for name, chains in portion.items() if chains is not None}
                ports = tuple(_reduced(ports, self._known.ports(key), chains))
                self.kept |= stay
                self.reduced |= chains.keys()
            doubtful = [
                port
                for port in ports
                if port.port.name not in known and quarantine.is_doubtful(port) and self._can_stay(port)
            ]
            suspects = {port.port.name for port in ports if port.port.name in held}
            suspects.update(port.port.name for port in doubtful)
            if suspects:
                self.doubtful += doubtful
                self.held |= suspects
                stay |= suspects
                ports = tuple(port for port in ports if port.port.name not in suspects)
            self.services[key] = ports
            yield DesiredService(
                key,
                tuple(
                    DesiredPort(
                        port.port.name,
                        quarantine.rules(port, options, port.port.name in self._tried),
                        len(port.selection.verdicts),
                        port.port.name in self.reduced,
                    )
                    for port in ports
                ),
                frozenset(stay),
            )

    def _can_stay(self, port: ResolvedPort) -> bool:
        """Return whether rules of a port may change, and the tables have no rules for it that nobody owns yet."""
        name, known = port.port.name, self._known
        rules = port_rules(port.port, port.selection, self.context.options)
        may_change = any(root in known.outdated for root, _ in rules.entries)
        may_change = may_change or not is_written(known, DesiredPort(name, rules, 0))
        return may_change and not known.has_unowned_rules(name)


def resolve_service(cluster: Cluster, service: Key, context: RuleContext) -> tuple[ResolvedPort, ...]:
    """Return the ports of one Service, by name; none if it is oversized."""
    found = context.resolve(cluster, service)
    return () if isinstance(found, Oversized) else _by_name(found)


def _reduced(
    ports: Iterable[ResolvedPort], before: Iterable[KnownPort], allowed: Mapping[PortName, Container[str]]
) -> Iterator[ResolvedPort]:
    """Yield ports; those in `allowed` with only the endpoints that have one of these chains, or not if new with others."""
    known = {port.name for port in before}
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
        used = {endpoint.target for endpoint in selection.reachable}
        if kept or name in known or not used:
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
