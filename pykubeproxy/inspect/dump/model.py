"""The services that the rules of one family serve: names, frontends, endpoints and their shares."""

import typing
from collections.abc import Iterable, Mapping

import msgspec

from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.node import NodeRules
from pykubeproxy.inspect.routes import (
    FrontendRule,
    PacketVerdict,
    Policy,
    PolicyRoute,
    affinity_seconds,
    chains_from,
    health_checks,
    rejecting_rules,
    route,
    rule_limit,
    serving_rules,
    shares,
)
from pykubeproxy.inspect.targets import ServiceFilter, parse_title
from pykubeproxy.objects import Family, Key, Port, Protocol, Service
from pykubeproxy.rules import names
from pykubeproxy.rules.iptables_save import parse_number, parse_rule
from pykubeproxy.rules.ruleset import ChainKey, Count, Counters, Ruleset
from pykubeproxy.services.ports import Frontend, FrontendKind, PortName

_KINDS = list(FrontendKind)


class EndpointView(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """An endpoint of a service port.

    - `share`: its probability to get a new connection, 0 to 1
    - `packets`: connections since its chain was written, of both policies: table nat sees their first packets only
    - `bytes`: the size of these packets
    - `chain`: its KUBE-SEP-… chain
    """

    address: str
    port: int
    share: float
    packets: int
    bytes: int
    chain: str = ""


class ServiceView(msgspec.Struct, frozen=True, rename="camel"):
    """One service port in one family under one traffic policy.

    - `service`: the name of the Service; if it is unknown, `namespace` is "" and this the name of a chain
    - `policy`: "Cluster" or "Local"; the rules do not show that of a rejected port, then "Cluster"
    - `verdict`: "dnat" with endpoints, "reject" without, "drop" with endpoints on other nodes only, "pass" without a rule
    - `frontends`: the addresses under this policy; that of a node port is "*" if all addresses of the node count
    - `from_this_node`: under external policy Local, the frontends that lead here only from this node and its pods
    - `affinity_seconds`: how long a client keeps its endpoint; null without session affinity
    - `source_ranges`: the sources allowed at load balancer IPs; null for all
    - `health_check_node_port`: null without one
    - `chain`: the balancing chain; null without endpoints
    - `quarantined`: not served, in quarantine; the agent's status has the reason
    """

    namespace: str
    service: str = msgspec.field(name="name")
    port: str
    protocol: str
    family: Family
    policy: Policy
    verdict: PacketVerdict
    frontends: tuple[Frontend, ...]
    from_this_node: tuple[Frontend, ...]
    endpoints: tuple[EndpointView, ...]
    affinity_seconds: int | None
    source_ranges: tuple[str, ...] | None
    health_check_node_port: int | None
    chain: str | None = None
    quarantined: bool = False

    @property
    def name(self) -> PortName:
        return PortName(self.namespace, self.service, self.port, self.protocol)


class FrontendRules(msgspec.Struct, frozen=True):
    """The rules for the frontends of one service port: in nat those that serve, in filter those that reject."""

    serving: list[FrontendRule]
    rejecting: list[FrontendRule]

    def numbers(self) -> set[int]:
        """Return the port numbers of the frontends."""
        return {rule.frontend.port for rule in (*self.serving, *self.rejecting)}


def find_ports(ruleset: Ruleset, filter_: ServiceFilter) -> Mapping[PortName, FrontendRules]:
    """Return the matching service ports of one family, sorted."""
    resolver = _NameResolver(ruleset, filter_)
    ports: dict[PortName, FrontendRules] = {}
    for rule in serving_rules(ruleset):
        ports.setdefault(resolver.resolve(rule), FrontendRules([], [])).serving.append(rule)
    for rule in rejecting_rules(ruleset):
        ports.setdefault(resolver.resolve(rule), FrontendRules([], [])).rejecting.append(rule)
    return {name: ports[name] for name in sorted(ports) if filter_.matches(name, ports[name].numbers())}


def views(
    ruleset: Ruleset, counters: Counters, filter_: ServiceFilter | None = None
) -> tuple[ServiceView, ...]:
    """Return the matching services of one family, a view for each service port and policy.

    The rules do not show the policy of a rejected service; its view has policy Cluster.
    """
    return port_views(ruleset, counters, find_ports(ruleset, filter_ or ServiceFilter()))


def port_views(
    ruleset: Ruleset, counters: Counters, ports: Mapping[PortName, FrontendRules]
) -> tuple[ServiceView, ...]:
    """Return the views of some of the service ports that `find_ports` has found."""
    chains = _IptablesChains(ruleset, counters, rule_limit())
    checks = health_checks(ruleset)
    return tuple(
        view
        for name, rules in ports.items()
        for view in _PortReader(chains, name, checks.get(str(name), 0)).views(rules)
    )


def node_views(rules: NodeRules, filter_: ServiceFilter | None = None) -> tuple[ServiceView, ...]:
    """Return the matching services that a proxy of any mode serves on a node."""
    if not rules.nftables or not rules.in_nftables_mode:
        return views(rules.ruleset, rules.counters, filter_)
    from pykubeproxy.inspect.dump.nftables import NftServiceChains  # few nodes have such rules

    chains = NftServiceChains(rules.nftables, rule_limit())
    ports = _ports_of(rules, filter_ or ServiceFilter())
    return tuple(view for name, found in ports.items() for view in _PortReader(chains, name, 0).views(found))


def in_order(views: Iterable[ServiceView]) -> tuple[ServiceView, ...]:
    """Sort views by service port, then family, then policy."""
    return tuple(sorted(views, key=lambda view: (view.name, view.family.value, view.policy.value)))


class _PolicyRules(msgspec.Struct):
    chain: str = ""
    frontends: dict[Frontend, None] = {}
    from_this_node: dict[Frontend, None] = {}
    source_ranges: tuple[str, ...] | None = None
    rejection: PacketVerdict | None = None
    quarantined: bool = False


class ServiceChains(typing.Protocol):
    """The chains of service ports in the rules of one family."""

    @property
    def family(self) -> Family: ...

    def route(self, chain: str) -> PolicyRoute:
        """Return the route from the target of a frontend's rule."""

    def endpoints(self, chain: str) -> Iterable[EndpointView]:
        """Return the endpoints over which a chain balances."""

    def affinity_seconds(self, chain: str) -> int | None:
        """Return the timeout of session affinity; None without affinity."""


class _IptablesChains(msgspec.Struct, frozen=True):
    ruleset: Ruleset
    counters: Counters
    limit: RuleLimit

    @property
    def family(self) -> Family:
        return self.ruleset.family

    def route(self, chain: str) -> PolicyRoute:
        return route(self.ruleset, chain)

    def affinity_seconds(self, chain: str) -> int | None:
        return affinity_seconds(self.ruleset, chain)

    def endpoints(self, chain: str) -> Iterable[EndpointView]:
        for share in shares(self.ruleset, chain, self.limit):
            address, _, port = share.target.rpartition(":")
            key, position = share.rule
            counts = self.counters.get(key, ())
            count = counts[position] if position < len(counts) else Count()
            yield EndpointView(
                address.strip("[]"),
                parse_number(port),
                round(share.probability, 9),  # iptables keeps 31 bits
                count.packets,
                count.bytes,
                key.chain,
            )


class _PortReader(msgspec.Struct, frozen=True):
    chains: ServiceChains
    name: PortName
    health_check_node_port: int

    def views(self, rules: FrontendRules) -> Iterable[ServiceView]:
        policies = {policy: _PolicyRules() for policy in Policy}
        frontends = [rule.frontend for rule in rules.serving]
        balancers = {
            frontend.address for frontend in frontends if frontend.kind is FrontendKind.LOAD_BALANCER_IP
        }
        for rule in rules.serving:
            _add_route(policies, rule.frontend, self.chains.route(rule.target), balancers)
        for rule in rules.rejecting:
            _add_rejection(policies, rule)
        for policy, collected in policies.items():
            if collected.frontends or collected.from_this_node:
                yield self._view(policy, collected)

    def _view(self, policy: Policy, collected: _PolicyRules) -> ServiceView:
        endpoints = tuple(self.chains.endpoints(collected.chain)) if collected.chain else ()
        name = self.name
        return ServiceView(
            namespace=name.namespace,
            service=name.service,
            port=name.port,
            protocol=name.protocol,
            family=self.chains.family,
            policy=policy,
            verdict=PacketVerdict.DNAT if endpoints else collected.rejection or PacketVerdict.PASS,
            frontends=_by_kind(collected.frontends),
            from_this_node=_by_kind(collected.from_this_node),
            endpoints=endpoints,
            affinity_seconds=self.chains.affinity_seconds(collected.chain) if collected.chain else None,
            source_ranges=collected.source_ranges,
            health_check_node_port=self.health_check_node_port or None if policy is Policy.LOCAL else None,
            chain=collected.chain if endpoints else None,
            quarantined=collected.quarantined,
        )


def _add_route(
    policies: Mapping[Policy, _PolicyRules],
    frontend: Frontend,
    found: PolicyRoute,
    balancers: Iterable[str],
) -> None:
    collected = policies[found.policy]
    collected.chain = found.chain or collected.chain
    collected.frontends[frontend] = None
    if found.source_ranges is not None:
        # A load balancer's own IP is allowed for the node's sake, although no range of the Service has it.
        own = {f"{address}/{128 if ':' in address else 32}" for address in balancers}
        collected.source_ranges = tuple(r for r in found.source_ranges if r not in own)
    if found.shortcut:
        policies[Policy.CLUSTER].from_this_node[frontend] = None
        policies[Policy.CLUSTER].chain = found.shortcut


def _add_rejection(policies: Mapping[Policy, _PolicyRules], rule: FrontendRule) -> None:
    """Add a rejected frontend to its policy in nat, or to the policy that the verdict suggests."""
    verdict = PacketVerdict(rule.target.lower() or PacketVerdict.PASS)
    for collected in policies.values():
        if not collected.chain and any(_same(frontend, rule.frontend) for frontend in collected.frontends):
            collected.rejection = verdict
            return
    collected = policies[Policy.LOCAL if verdict is PacketVerdict.DROP else Policy.CLUSTER]
    collected.frontends[rule.frontend] = None
    collected.rejection = verdict
    collected.quarantined = rule.quarantined


def _same(serving: Frontend, rejected: Frontend) -> bool:
    """Compare frontends of nat and filter; table filter rejects a node port at all addresses at once."""
    node_ports = serving.kind is rejected.kind is FrontendKind.NODE_PORT
    return serving.port == rejected.port and (node_ports or serving.address == rejected.address)


def _by_kind(frontends: Iterable[Frontend]) -> tuple[Frontend, ...]:
    return tuple(sorted(frontends, key=lambda frontend: _KINDS.index(frontend.kind)))


class _NameResolver:
    """Find names by the rule's comment, by comments in the chains below, or by the hash in the chain's name.

    A name from elsewhere than the rule's own comment must yield the chain's name. The filter may supply a name that no
    comment has.
    """

    def __init__(self, ruleset: Ruleset, filter_: ServiceFilter) -> None:
        self._ruleset = ruleset
        self._filter = filter_
        self._by_hash: dict[str, PortName] | None = None
        self._limit = rule_limit()

    def resolve(self, rule: FrontendRule) -> PortName:
        """Return the service port; if its name is unknown, one named after the chain, without namespace."""
        if rule.title:
            return parse_title(rule.title, rule.protocol)
        hashed = rule.target[-16:]
        for key in chains_from(self._ruleset, rule.target, limit=self._limit):
            for title in _titles(self._ruleset, key):
                if _hash(name := parse_title(title, rule.protocol)) == hashed:
                    return name
        if self._by_hash is None:
            self._by_hash = {_hash(name): name for name in self._all_names()}
        return self._by_hash.get(hashed, PortName("", rule.target, "", rule.protocol))

    def _all_names(self) -> Iterable[PortName]:
        titles = {title for key in self._ruleset.chains for title in _titles(self._ruleset, key)}
        if self._filter.namespace and self._filter.name:
            titles.add(str(self._filter))
        return (parse_title(title, protocol.value) for title in titles for protocol in Protocol)


def _titles(ruleset: Ruleset, key: ChainKey) -> Iterable[str]:
    """Return the words in a chain's comments that look like names of service ports."""
    if not key.chain.startswith("KUBE-"):
        return ()
    comments = (parse_rule(text).comment for text in ruleset.chains[key] if "/" in text)
    return (word for comment in comments for word in comment.split() if "/" in word and word.isascii())


def _hash(name: PortName) -> str:
    return names.cluster_chain(name).removeprefix(names.CLUSTER_PREFIX)


_PROTOCOLS = {protocol.value for protocol in Protocol}
_FIELDS = {
    FrontendKind.CLUSTER_IP: "cluster_ips",
    FrontendKind.EXTERNAL_IP: "external_ips",
    FrontendKind.LOAD_BALANCER_IP: "load_balancer_ips",
}


def services_of(families: Iterable[NodeRules], filter_: ServiceFilter | None = None) -> tuple[Service, ...]:
    """Return the matching Services with the frontends that the rules of both families serve or reject."""
    found: dict[PortName, list[Frontend]] = {}
    for family_rules in families:
        for name, rules in _ports_of(family_rules, filter_ or ServiceFilter()).items():
            found.setdefault(name, []).extend(rule.frontend for rule in (*rules.serving, *rules.rejecting))
    services: dict[Key, Service] = {}
    for name, frontends in found.items():
        # A chain without comments has no name; rules of other programs may have any protocol.
        if name.namespace and name.protocol.upper() in _PROTOCOLS:
            services[name.service_key] = _with_port(services.get(name.service_key), name, frontends)
    return tuple(services.values())


def _ports_of(rules: NodeRules, filter_: ServiceFilter) -> Mapping[PortName, FrontendRules]:
    if not rules.nftables or not rules.in_nftables_mode:
        return find_ports(rules.ruleset, filter_)
    from pykubeproxy.inspect.dump.nftables import find_nft_ports  # few nodes have such rules

    return find_nft_ports(rules.nftables, filter_)


def _with_port(service: Service | None, name: PortName, frontends: Iterable[Frontend]) -> Service:
    service = service or Service(name.namespace, name.service)
    number = node_port = 0
    addresses: dict[str, tuple[str, ...]] = {}
    for frontend in frontends:
        if field := _FIELDS.get(frontend.kind):
            number = frontend.port
            addresses[field] = (*addresses.get(field, getattr(service, field)), frontend.address)
        else:
            node_port = frontend.port
    unique = {field: tuple(dict.fromkeys(some)) for field, some in addresses.items()}
    port = Port(name.port, Protocol(name.protocol.upper()), number, node_port)
    return msgspec.structs.replace(service, ports=(*service.ports, port), **unique)
