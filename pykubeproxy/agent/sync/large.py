"""Which Services wait for their turn, so that the changes of one namespace do not delay the others."""

from collections import Counter
from collections.abc import Collection, Container

from pykubeproxy.objects import Family, Key
from pykubeproxy.rules import names
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName, ServiceSkipReason, cluster_ip
from pykubeproxy.services.size import count_pairs, oversized

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

# Service ports that wait for a turn, by Service, in the order of turns.
Waiting = dict[Key, dict[PortName, None]]


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
    return any(it in rule for rules in live.chains.values() for rule in rules for it in comments)


def _cost(cluster: Cluster, key: Key, family: Family) -> int:
    """Return the pairs of a Service, and half a pair for the chain of each port: it may have but one endpoint."""
    service = cluster.service(key)
    return count_pairs(cluster, key, family) + (len(service.ports) // 2 if service else 0)


def _is_served(cluster: Cluster, key: Key, context: RuleContext) -> bool:
    service = cluster.service(key)
    if service is None:
        return False
    return not isinstance(cluster_ip(service, context.options.family), ServiceSkipReason)
