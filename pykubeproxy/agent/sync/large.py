"""Which Services are large, so that their syncs are deferred and delay no others."""

from pykubeproxy.objects import Key
from pykubeproxy.rules import names
from pykubeproxy.rules.applied import AppliedState
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName, ServiceSkipReason, service_ports
from pykubeproxy.services.size import count_pairs, oversized

# Above this many pairs (see `count_pairs`) a Service is large: its sync takes long enough for others to notice.
LARGE_PAIRS = 5000


def may_defer(
    cluster: Cluster, service: Key, context: RuleContext, applied: AppliedState, live: Ruleset | None
) -> bool:
    """Return whether to defer the sync of a Service: it is large, and can keep the rules it has, if any.

    One that is no longer served cannot.

    `live` are the tables of a full sync. The rules can stay only if all their chains exist: others jump to them.
    """
    found, family = cluster.service(service), context.options.family
    if found is None or count_pairs(cluster, service, family) <= LARGE_PAIRS:
        return False
    if oversized(cluster, service, family, context.max_service_pairs):
        return False
    if isinstance(service_ports(found, family), ServiceSkipReason):
        return False
    if applied.ports(service):
        return applied.holds_all_chains(service)
    if live is None:
        return True
    # After a restart, the applied state does not know the rules that an earlier agent wrote, maybe for other ports.
    ports = (PortName(*service, port.name, port.protocol.value) for port in found.ports)
    chains = (chain for port in ports for chain in (names.cluster_chain(port), names.local_chain(port)))
    return not (any(ChainKey("nat", chain) in live.chains for chain in chains) or _names(live, service))


def _names(live: Ruleset, service: Key) -> bool:
    """Return whether the comment of a rule names a Service."""
    comments = f'"{service}:', f'"{service} '
    return any(it in rule for rules in live.chains.values() for rule in rules for it in comments)
