"""The verdict on a node: which Services have rules there that do not follow the objects."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from pykubeproxy.config import Dispatch, load
from pykubeproxy.config.table import HEALTH_PORT, METRICS_PORT
from pykubeproxy.inspect.diff.by_meaning import (
    PortTitle,
    client_differences,
    contested_destinations,
    titled,
    wrong_services,
)
from pykubeproxy.inspect.diff.desired import DesiredRules
from pykubeproxy.inspect.diff.report import Contested, NodeResult, NodeVerdict
from pykubeproxy.inspect.meaning.comparison import (
    LOCAL_NETWORK,
    MeaningComparison,
    nft_proxy_part,
    proxy_part,
    with_source,
)
from pykubeproxy.inspect.meaning.outcomes import MeaningChange, NftablesDesign, older_version
from pykubeproxy.inspect.node import NodeRules, NodeState
from pykubeproxy.inspect.packets.addresses import Addresses, parse_addresses, union
from pykubeproxy.inspect.routes import rejecting_rules
from pykubeproxy.objects import Family, Key, Node, Protocol, family_of, of_family
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.dispatch import node_port_jumps
from pykubeproxy.rules.inferred import (
    InferredSettings,
    inferred_facts,
    inferred_nft_settings,
    inferred_settings,
    keeps_affinity,
    nft_node_port_addresses,
)
from pykubeproxy.rules.nft_list import NftRuleset
from pykubeproxy.rules.options import LocalTraffic, RuleOptions
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster, kept_claims
from pykubeproxy.services.ports import ApiServers, PortName
from pykubeproxy.services.selection import NodeTopology

_OURS = "pykubeproxy"
_NO_RULES = "has no {}rules of a service proxy"
# The Service that the API servers keep for themselves.
_KUBERNETES = Key("default", "kubernetes")


class NodeComparison:
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
        *,
        with_clients: bool = False,
    ) -> None:
        self.cluster = cluster
        self._api_servers = api_servers | _api_servers(cluster)
        self.comparison = comparison or MeaningComparison()
        self._with_clients = with_clients
        self._desired = DesiredRules(cluster)
        self._default_lists = load(None, {}).config.max_affinity_lists
        self._contested = contested_destinations(cluster)
        self._cluster_ips = frozenset(ip for service in cluster.services() for ip in service.cluster_ips)

    def compare(self, state: NodeState, desired: Mapping[Family, Ruleset] | None = None) -> NodeResult:
        """Compare what packets get on a node with what they should get. Raises TooManyRules.

        `desired` are the rules that the node should have; without them, its settings are inferred.
        """
        settings: dict[str, str] = {}
        changes: list[MeaningChange] = []
        lacking: list[Family] = []
        for family, rules in state.rules.items():
            ruleset = rules.ruleset
            if rules.nftables and rules.in_nftables_mode:
                nft = nft_proxy_part(rules.nftables)
                if found := inferred_nft_settings(nft):
                    settings |= _nft_described(nft, found, state.node)
                    changes += self._nft_changes(state, nft, found, desired[family] if desired else None)
                else:
                    lacking.append(family)
            elif desired is not None:
                changes += self._unexplained(proxy_part(ruleset), proxy_part(desired[family]), state)
            elif inferred := inferred_settings(ruleset):
                settings |= described(inferred, state.node, family)
                changes += self._changes(state, ruleset, inferred)
            else:
                lacking.append(family)
        if lacking and len(lacking) == len(state.rules):
            return self._judged(state, changes, settings, _NO_RULES.format(""))
        needed = (family for family in lacking if self._needs(state.node, family))
        reasons = (_NO_RULES.format(f"{family.value} ") for family in needed)
        return self._judged(state, changes, settings, next(reasons, None))

    def _judged(
        self,
        state: NodeState,
        changes: Sequence[MeaningChange],
        settings: Mapping[str, str],
        reason: str | None,
    ) -> NodeResult:
        """Return the result with the changes that are no design of the proxy."""
        ours = state.origin.proxy.startswith(_OURS)
        pages = {(address, port) for address in state.node.addresses for port in (HEALTH_PORT, METRICS_PORT)}
        reserved = self._api_servers | pages if ours else ()
        marked = {
            family: {rule.title for rule in rejecting_rules(rules.ruleset) if rule.quarantined}
            for family, rules in state.rules.items()
        }
        wrong: dict[PortTitle, list[MeaningChange]] = {}
        quarantined: set[Key] = set()
        contested: set[Contested] = set()
        for title, change in titled(changes, self.cluster):
            to = change.destination
            served = any(outcome.endpoint for outcome in change.before)
            names = {str(title.service), f"{title.service}:{title.port}"}
            if not served and names & marked.get(family_of(to.address), set()):
                quarantined.add(title.service)
            elif to in self._contested and not ours:
                contested.add(self._contested[to])
            elif served or to.protocol != Protocol.TCP.value or (to.address, to.port) not in reserved:
                wrong.setdefault(title, []).append(change)
        differing = (meaning_change for some in wrong.values() for meaning_change in some)
        return NodeResult(
            state.name or None,
            NodeVerdict.DIFFERS if wrong or reason else NodeVerdict.FOLLOWS,
            proxy=state.origin.proxy or None,
            pod=state.origin.pod or None,
            reason=reason,
            settings=settings,
            wrong=wrong_services(wrong, state.network),
            quarantined=tuple(map(str, sorted(quarantined))),
            contested=tuple(sorted(contested)),
            clients=client_differences(differing) if self._with_clients else None,
        )

    def desired(self, node: Node, live: NodeRules, proxy: str = "") -> Ruleset:
        """Return the rules of a family that the node should have, with the settings of the rules it has."""
        context = inferred_context(node, live, proxy)
        return self._desired.ruleset(context, self._unkept_lists(live.ruleset))

    def _needs(self, node: Node, family: Family) -> bool:
        """Return whether a node and a Service have addresses of a family."""
        return any(family_of(address) is family for address in node.addresses) and any(
            family_of(ip) is family for ip in self._cluster_ips
        )

    def _changes(
        self, state: NodeState, live: Ruleset, inferred: InferredSettings
    ) -> Iterator[MeaningChange]:
        node, before = state.node, proxy_part(live)
        local_network = inferred.local_traffic.source if inferred.local_traffic else ""
        if local_network in node.pod_cidrs:
            # Rules that name this network would be others on each node.
            common = LOCAL_NETWORK[live.family]
            before = with_source(before, local_network, common)
            inferred = msgspec.structs.replace(inferred, local_traffic=LocalTraffic(source=common))
        else:
            local_network = ""
        context = _context(node, live, inferred, state.origin.proxy)
        desired = self._desired.ruleset(context, self._unkept_lists(live))
        return self._unexplained(before, desired, state, local_network)

    def _nft_changes(
        self, state: NodeState, live: NftRuleset, inferred: InferredSettings, desired: Ruleset | None
    ) -> Iterator[MeaningChange]:
        node = state.node
        if desired is None:
            context = _context(node, Ruleset(live.family, {}), inferred, state.origin.proxy)
            desired = self._desired.ruleset(context, {})
        design = self._nft_design(node, live)
        return self.comparison.changes(live, proxy_part(desired), state.network, design=design)

    def _nft_design(self, node: Node, live: NftRuleset) -> NftablesDesign:
        return NftablesDesign(
            nft_node_port_addresses(live),
            self._endpoints.get(node.name, frozenset()),
            self._cluster_ips,
            self._external,
            self._admitted,
        )

    @cached_property
    def _endpoints(self) -> Mapping[str, frozenset[str]]:
        """The addresses of endpoints by node."""
        found: dict[str, set[str]] = {}
        for service in self.cluster.services():
            for slice_ in self.cluster.all_slices_of(service.key):
                for endpoint in slice_.endpoints:
                    found.setdefault(endpoint.node_name, set()).add(endpoint.address)
        return {node: frozenset(addresses) for node, addresses in found.items()}

    @cached_property
    def _external(self) -> frozenset[str]:
        """The addresses of Services that are no cluster IPs."""
        services = self.cluster.services()
        return frozenset(ip for one in services for ip in (*one.external_ips, *one.load_balancer_ips))

    @cached_property
    def _admitted(self) -> Mapping[str, Addresses]:
        """By load balancer IP, the clients in `loadBalancerSourceRanges`."""
        return {
            ip: union(map(parse_addresses, of_family(service.source_ranges, family_of(ip))))
            for service in self.cluster.services()
            if service.source_ranges
            for ip in service.load_balancer_ips
        }

    def _unexplained(
        self, before: Ruleset, desired: Ruleset, state: NodeState, local_network: str = ""
    ) -> Iterator[MeaningChange]:
        """Yield the changes that the version of the proxy does not explain."""
        version = older_version(before)
        for change in self.comparison.changes(before, desired, state.network, local_network):
            if not version.explains(change, state.network, self._cluster_ips):
                yield change

    def _unkept_lists(self, live: Ruleset) -> dict[Key, int]:
        """Return the Services from which the proxy withholds session affinity by maxAffinityLists, with their lists.

        In each namespace, assume the limit with which its rules agree, but no lower one than the default: either none,
        or the lists in use.
        """
        unkept = {}
        for namespace, claims in self.cluster.affinity.claims.items():
            if sum(claim.lists for claim in claims.values()) <= self._default_lists:
                continue
            found = {name: self._keeps_affinity(live, Key(namespace, name)) for name in claims}
            served = [claims[name] for name, keeps in found.items() if keeps is not None]
            kept = {name for name, keeps in found.items() if keeps}
            used = sum(claims[name].lists for name in kept)
            bounded = kept_claims(served, max(used, self._default_lists))
            unbounded = {claim.name for claim in served}
            if len(bounded ^ kept) < len(unbounded ^ kept):
                unkept.update(
                    {Key(namespace, claim.name): claim.lists for claim in served if claim.name not in bounded}
                )
        return unkept

    def _keeps_affinity(self, live: Ruleset, key: Key) -> bool | None:
        """Return whether the rules of a Service have session affinity; None without endpoints."""
        service = self.cluster.service(key)
        ports = service.ports if service else ()
        found = [keeps_affinity(live, PortName(*key, port.name, port.protocol.value)) for port in ports]
        return any(found) if any(kept is not None for kept in found) else None


def _api_servers(cluster: Cluster) -> ApiServers:
    """Return where the API servers listen, as they say themselves."""
    return frozenset(
        (endpoint.address, port.port)
        for slice_ in cluster.all_slices_of(_KUBERNETES)
        for endpoint in slice_.endpoints
        for port in slice_.ports
        if port.port
    )


def inferred_context(node: Node, live: NodeRules, proxy: str = "") -> RuleContext:
    """Return what the rules of a node depend on besides Services, as far as these rules show it."""
    nft = live.nftables if live.in_nftables_mode else None
    inferred = inferred_nft_settings(nft) if nft else inferred_settings(live.ruleset)
    return _context(node, live.ruleset, inferred or InferredSettings(), proxy)


def _context(node: Node, live: Ruleset, inferred: InferredSettings, proxy: str) -> RuleContext:
    addresses = [address for address in node.addresses if family_of(address) is live.family]
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


def described(settings: InferredSettings, node: Node, family: Family) -> Mapping[str, str]:
    """Return the settings of one family by name; nodes with the same configuration get the same text."""
    if not settings.serves:
        return {}
    suffix = "" if family is Family.IPV4 else f" ({family.value})"
    found = {
        "masqueradeAll": str(settings.masquerade_all).lower(),
        "masqueradeBit": str(settings.masquerade_bit),
        "nodePortAddresses": _node_ports(settings.node_port_jumps),
        "localhostNodePorts": str(settings.localhost_node_ports).lower(),
    }
    if settings.local_traffic or not settings.masquerade_all:
        found["detectLocal"] = _local_traffic(settings, node)
    return {f"{name}{suffix}": value for name, value in found.items()}


def _nft_described(rules: NftRuleset, settings: InferredSettings, node: Node) -> Mapping[str, str]:
    """Return the settings of a kube-proxy in nftables mode, as `described` does."""
    addresses = nft_node_port_addresses(rules)
    node_ports = (
        "all" if addresses is None else "primary" if addresses <= set(node.addresses) else "some addresses"
    )
    found = {**described(settings, node, rules.family), "mode": "nftables"}
    return {
        name: node_ports if name.startswith("nodePortAddresses") else value
        for name, value in found.items()
        if not name.startswith("localhostNodePorts")
    }


def _local_traffic(settings: InferredSettings, node: Node) -> str:
    local = settings.local_traffic
    if local is None:
        return "none"
    if local.interface:
        return f"interface {local.interface}"
    return "podCIDR of the Node" if local.source in node.pod_cidrs else local.source


def _node_ports(jumps: tuple[str, ...]) -> str:
    if not jumps:
        return "no address"
    return "all" if any("--dst-type LOCAL" in jump for jump in jumps) else "some addresses"
