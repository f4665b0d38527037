"""The verdict on each node of a cluster: which Services have rules there that do not follow the objects."""

import enum
from collections.abc import Iterator, Mapping

import msgspec

from pykubeproxy.config import Dispatch, load
from pykubeproxy.config.table import HEALTH_PORT, METRICS_PORT
from pykubeproxy.inspect.fleet.desired import DesiredRules
from pykubeproxy.inspect.fleet.services import (
    Contested,
    PortTitle,
    WrongService,
    contested_destinations,
    titled,
    wrong_services,
)
from pykubeproxy.inspect.fleet.settings import described
from pykubeproxy.inspect.fleet.unserved import Unserved
from pykubeproxy.inspect.meaning.model import LOCAL_NETWORK, MeaningComparison, proxy_part, with_source
from pykubeproxy.inspect.meaning.outcomes import MeaningChange
from pykubeproxy.inspect.meaning.versions import older_version
from pykubeproxy.inspect.node_tables import NodeTables
from pykubeproxy.inspect.trace.packet import Host
from pykubeproxy.objects import Family, Key, Node, family_of
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.dispatch import node_port_jumps
from pykubeproxy.rules.inferred import InferredSettings, inferred_facts, inferred_settings, keeps_affinity
from pykubeproxy.rules.options import LocalTraffic, RuleOptions
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.affinity import kept_claims
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ApiServers, PortName
from pykubeproxy.services.selection import NodeTopology

_OURS = "pykubeproxy"
_NO_RULES = "has no {}rules of a service proxy"
# The Service that the API servers keep for themselves.
_KUBERNETES = Key("default", "kubernetes")


class NodeVerdict(enum.Enum):
    """Whether the rules of a node follow the objects.

    `CATCHING_UP`: some do not, but their objects changed a moment ago.
    """

    FOLLOWS = "follows"
    CATCHING_UP = "catching up"
    DIFFERS = "differs"
    NOT_COMPARED = "not compared"


class NodeResult(msgspec.Struct, frozen=True):
    """What is known about one node.

    - `proxy`, `pod`: which proxy runs there, and its pod or the one that was asked; "" if unknown
    - `reason`: why it is not compared, or which rules it lacks altogether; else ""
    - `other_proxy`: no fault is the cause: its proxy does not use such rules
    - `wrong`: Services with rules that do not follow the objects, sorted
    - `since`: it has not followed the objects since this time or longer, in seconds since 1970; None if unknown
    - `quarantined`: Services that its agent quarantined; none of these is among the wrong ones for that
    - `contested`: addresses of several Services, of which its kube-proxy serves another one than others may
    - `settings`: those that its rules show, by name
    """

    node: str
    verdict: NodeVerdict
    proxy: str = ""
    pod: str = ""
    reason: str = ""
    other_proxy: bool = False
    wrong: tuple[WrongService, ...] = ()
    since: float | None = None
    quarantined: tuple[Key, ...] = ()
    contested: tuple[Contested, ...] = ()
    settings: Mapping[str, str] = {}


class FleetComparison:
    """Compares the rules of one node after the other with the objects of a cluster, which must not change meanwhile.

    Settings of each proxy are inferred from its rules: another configuration is no difference of Services. Nor is it one
    that an agent quarantined a Service, or does not serve an external address of one of the `api_servers` or of its own
    pages, if those have the usual ports.
    """

    def __init__(
        self,
        cluster: Cluster,
        comparison: MeaningComparison | None = None,
        api_servers: ApiServers = frozenset(),
    ) -> None:
        self.cluster = cluster
        self._api_servers = api_servers | _api_servers(cluster)
        self.comparison = comparison or MeaningComparison()
        self._desired = DesiredRules(cluster)
        self._default_lists = load(None, {}).config.max_affinity_lists
        self._contested = contested_destinations(cluster)
        self._cluster_ips = frozenset(ip for it in cluster.services() for ip in it.cluster_ips)

    def compare(self, tables: NodeTables) -> NodeResult:
        """Compare the tables of one node. Raises TooManyRules."""
        node, rulesets, proxy, pod = tables.node, tables.rulesets, tables.proxy, tables.pod
        host = Host(frozenset(node.addresses))
        settings: dict[str, str] = {}
        changes: list[MeaningChange] = []
        lacking: list[Family] = []
        for family, live in rulesets.items():
            inferred = inferred_settings(live)
            if inferred is None:
                lacking.append(family)
                continue
            settings |= described(inferred, node, family)
            changes += self._changes(node, live, inferred, host, proxy)
        if len(lacking) == len(rulesets):
            return NodeResult(node.name, NodeVerdict.DIFFERS, proxy, pod, _NO_RULES.format(""))
        reasons = [_NO_RULES.format(f"{it.value} ") for it in lacking if self._needs(node, it)]
        reason = reasons[0] if reasons else ""
        pages = {(address, port) for address in node.addresses for port in (HEALTH_PORT, METRICS_PORT)}
        unserved = Unserved.from_rules(rulesets, self._api_servers | pages if proxy.startswith(_OURS) else ())
        wrong: dict[PortTitle, list[MeaningChange]] = {}
        quarantined: set[Key] = set()
        contested: set[Contested] = set()
        for title, change in titled(changes, self.cluster):
            if unserved.is_quarantined(title, change):
                quarantined.add(title.service)
            elif change.destination in self._contested and not proxy.startswith(_OURS):
                contested.add(self._contested[change.destination])
            elif not unserved.is_reserved(change):
                wrong.setdefault(title, []).append(change)
        services = wrong_services(wrong, host)
        verdict = NodeVerdict.DIFFERS if services or reason else NodeVerdict.FOLLOWS
        return NodeResult(
            node.name,
            verdict,
            proxy,
            pod,
            reason,
            wrong=services,
            quarantined=tuple(sorted(quarantined)),
            contested=tuple(sorted(contested)),
            settings=settings,
        )

    def desired(self, node: Node, live: Ruleset, proxy: str = "") -> Ruleset:
        """Return the rules of a family that the node should have, with the settings of the rules it has."""
        context = _context(node, live, inferred_settings(live) or InferredSettings(), proxy)
        return self._desired.ruleset(context, self._unkept_lists(live))

    def _needs(self, node: Node, family: Family) -> bool:
        """Return whether a node and a Service have addresses of a family."""
        return any(family_of(it) is family for it in node.addresses) and any(
            family_of(it) is family for it in self._cluster_ips
        )

    def _changes(
        self, node: Node, live: Ruleset, inferred: InferredSettings, host: Host, proxy: str
    ) -> Iterator[MeaningChange]:
        before = proxy_part(live)
        local_network = inferred.local_traffic.source if inferred.local_traffic else ""
        if local_network in node.pod_cidrs:
            # Rules that name this network would be others on each node.
            common = LOCAL_NETWORK[live.family]
            before = with_source(before, local_network, common)
            inferred = msgspec.structs.replace(inferred, local_traffic=LocalTraffic(source=common))
        else:
            local_network = ""
        desired = self._desired.ruleset(_context(node, live, inferred, proxy), self._unkept_lists(live))
        version = older_version(before)
        for change in self.comparison.changes(before, desired, host, local_network):
            if not version.explains(change, host, self._cluster_ips):
                yield change

    def _unkept_lists(self, live: Ruleset) -> dict[Key, int]:
        """Return the Services from which the proxy withholds session affinity by maxAffinityLists, with their lists.

        In each namespace, assume the limit with which its rules agree, but no lower one than the default: either none,
        or the lists in use.
        """
        unkept = {}
        for namespace, claims in self.cluster.affinity_claims().items():
            if sum(it.lists for it in claims.values()) <= self._default_lists:
                continue
            found = {name: self._keeps_affinity(live, Key(namespace, name)) for name in claims}
            served = [claims[name] for name, keeps in found.items() if keeps is not None]
            kept = {name for name, keeps in found.items() if keeps}
            used = sum(claims[name].lists for name in kept)
            bounded = kept_claims(served, max(used, self._default_lists))
            unbounded = {it.name for it in served}
            if len(bounded ^ kept) < len(unbounded ^ kept):
                unkept.update({Key(namespace, it.name): it.lists for it in served if it.name not in bounded})
        return unkept

    def _keeps_affinity(self, live: Ruleset, key: Key) -> bool | None:
        """Return whether the rules of a Service have session affinity; None without endpoints."""
        service = self.cluster.service(key)
        ports = service.ports if service else ()
        found = [keeps_affinity(live, PortName(*key, it.name, it.protocol.value)) for it in ports]
        return any(found) if any(it is not None for it in found) else None


def _api_servers(cluster: Cluster) -> ApiServers:
    """Return where the API servers listen, as they say themselves."""
    return frozenset(
        (endpoint.address, port.port)
        for slice_ in cluster.all_slices_of(_KUBERNETES)
        for endpoint in slice_.endpoints
        for port in slice_.ports
        if port.port
    )


def _context(node: Node, live: Ruleset, inferred: InferredSettings, proxy: str) -> RuleContext:
    addresses = [it for it in node.addresses if family_of(it) is live.family]
    facts = inferred_facts(live, node.addresses)
    options = RuleOptions(
        family=live.family,
        masquerade_bit=inferred.masquerade_bit,
        masquerade_all=inferred.masquerade_all,
        local_traffic=inferred.local_traffic,
        localhost_node_ports=inferred.localhost_node_ports,
        node_ip=addresses[0] if addresses else "",
        random_fully=facts.random_fully,
        nfacct=facts.nfacct,
        drop_invalid=not facts.tcp_be_liberal,
        dispatch=Dispatch.AUTO if proxy.startswith(_OURS) else Dispatch.FLAT,
    )
    jumps = inferred.node_port_jumps
    if not jumps and not options.ipv6:
        # A lost rule is likelier than nodePortAddresses without an IPv4 network.
        jumps = node_port_jumps((), (), options)
    return RuleContext(NodeTopology(node.name, node.zone), options, jumps)
