"""Render the rules of one service port: its own chains and its entries in shared chains."""

import ipaddress
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.config import Dispatch
from pykubeproxy.objects import Key
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.dispatch import Tree
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Entries, Rules
from pykubeproxy.rules.text import from_local, host, not_from_local, printed, probability, rule
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import PortName, ServicePort
from pykubeproxy.services.selection import Selection

# The end of the comments of rules for a quarantined service port.
QUARANTINED_COMMENT = "is quarantined"


class _PolicyPath(msgspec.Struct, frozen=True):
    """The target of one traffic policy: the chain that balances, or a filter rule that rejects or drops."""

    chain: str
    filter_target: str
    filter_comment: str


class _RuleInputs(msgspec.Struct, frozen=True):
    port: ServicePort
    selection: Selection
    internal: _PolicyPath
    external: _PolicyPath
    options: RuleOptions


class PortRules(msgspec.Struct, frozen=True):
    """The rules of one service port: `entries` in shared chains, and its own chains in table nat."""

    entries: Entries
    source: _RuleInputs | None = None

    def chains(self) -> Iterator[tuple[str, Rules]]:
        """Render the own chains, each before those it jumps to. They are not kept: they would take most of the memory."""
        return _chains(self.source) if self.source else iter(())


def port_rules(port: ServicePort, selection: Selection, options: RuleOptions) -> PortRules:
    """Return the rules of one service port for the selected endpoints."""
    cluster = _path(port, names.cluster_chain, selection.cluster, selection.any_usable, options)
    local = _path(port, names.local_chain, selection.local, selection.any_usable, options)
    internal = local if port.internal_local else cluster
    external = local if port.external_local else cluster
    source = _RuleInputs(port, selection, internal, external, options)
    return PortRules(tuple(_entries(source)), source)


def reject_rules(port: ServicePort, options: RuleOptions) -> PortRules:
    """Return the rules of a quarantined service port: reject new connections, as without endpoints.

    Its previous rules may lead to reused pod addresses or admit sources that are no longer allowed.
    """
    path = _PolicyPath("", _reject(options), f"{port.name} {QUARANTINED_COMMENT}")
    chains = (
        (skeleton.FILTER_SERVICES, _reject_internal(port, path)),
        (skeleton.FILTER_EXTERNAL, _reject_external(port, path)),
        (skeleton.FILTER_NODEPORTS, _health_check(port)),
    )
    return PortRules(tuple((key, tuple(rules)) for key, rules in chains if rules))


def reject_service(service: Key, cluster_ip: str, options: RuleOptions) -> PortRules:
    """Return one rule that rejects new connections to all ports of a quarantined Service at its cluster IP."""
    comment = f"{service} {QUARANTINED_COMMENT}"
    text = rule(destination=host(cluster_ip), comment=comment, target=_reject(options))
    return PortRules(((skeleton.FILTER_SERVICES, (text,)),))


def note_rules(port: ServicePort) -> PortRules:
    """Return a rule without effect that marks a quarantined service port whose reject rules are invalid too."""
    comment = f"{port.name} port {port.port} {QUARANTINED_COMMENT}"
    note = rule(destination=host(port.cluster_ip), protocol=port.protocol.value.lower(), comment=comment)
    return PortRules(((skeleton.FILTER_SERVICES, (note,)),))


def _path(
    port: ServicePort,
    chain: Callable[[PortName], str],
    endpoints: tuple[ResolvedEndpoint, ...],
    any_usable: bool,
    options: RuleOptions,
) -> _PolicyPath:
    """Reject clients if no node has an endpoint; drop packets under policy Local if only other nodes have one."""
    if endpoints:
        return _PolicyPath(chain(port.name), "", "")
    if any_usable:
        return _PolicyPath("", "DROP", f"{port.name} has no local endpoints")
    return _PolicyPath("", _reject(options), f"{port.name} has no endpoints")


def _reject(options: RuleOptions) -> str:
    return f"REJECT --reject-with {'icmp6-port-unreachable' if options.ipv6 else 'icmp-port-unreachable'}"


def _chains(source: _RuleInputs) -> Iterator[tuple[str, Rules]]:
    """Render the chains of a service port, each before those it jumps to."""
    port, selection, options = source.port, source.selection, source.options
    if not selection.any_usable and not selection.reachable:
        return
    if selection.any_usable and port.externally_accessible:
        if _filters_sources(port):
            yield names.firewall_chain(port.name), tuple(_firewall(port, options))
        yield names.external_chain(port.name), tuple(_external(port, source.external, options))
    targets = {
        endpoint.target: names.endpoint_chain(port.name, endpoint.target) for endpoint in selection.reachable
    }
    for used, chain, endpoints in (
        (port.uses_cluster_endpoints, names.cluster_chain(port.name), selection.cluster),
        (port.uses_local_endpoints, names.local_chain(port.name), selection.local),
    ):
        if used and endpoints:
            marking = _masquerade_internal(port, options) if chain == source.internal.chain else ""
            balanced = balance(
                port, chain, [(targets[endpoint.target], endpoint.target) for endpoint in endpoints], options
            )
            yield chain, (*([marking] if marking else []), *balanced.root)
            yield from balanced.chains
    yield from endpoint_chains(
        port, ((targets[endpoint.target], endpoint) for endpoint in selection.reachable), options
    )


def _masquerade_internal(port: ServicePort, options: RuleOptions) -> str:
    """Masquerade traffic to the cluster IP from outside the cluster: replies must return through this node."""
    sources: dict[str, str] | None = None
    if options.masquerade_all:
        sources = {}
    elif options.local_traffic:
        sources = not_from_local(options.local_traffic)
    if sources is None:
        return ""
    return _to(port, port.cluster_ip, f"{port.name} cluster IP", names.MARK_MASQ, **sources)


def _external(port: ServicePort, external: _PolicyPath, options: RuleOptions) -> Iterator[str]:
    """Yield the rules for traffic to a node port, an external IP or a load balancer IP.

    Policy Cluster masquerades, because replies from other nodes must return through this one. Policy Local keeps the
    client's address; it does not apply to pods of this node and to the node itself, which may use any endpoint. The
    node's own packets are masqueraded.
    """
    title = f"{port.name} external destinations"
    if not port.external_local:
        yield rule(comment=f"masquerade traffic for {title}", target=names.MARK_MASQ)
    else:
        cluster_chain = names.cluster_chain(port.name)
        if options.local_traffic:
            yield rule(
                **from_local(options.local_traffic), comment=f"pod traffic for {title}", target=cluster_chain
            )
        from_node = "-m addrtype --src-type LOCAL"
        yield rule(from_node, comment=f"masquerade LOCAL traffic for {title}", target=names.MARK_MASQ)
        yield rule(from_node, comment=f"route LOCAL traffic for {title}", target=cluster_chain)
    if external.chain:
        yield rule(target=external.chain)


def _filters_sources(port: ServicePort) -> bool:
    return bool(port.load_balancer_ips) and port.source_ranges is not None


def _firewall(port: ServicePort, options: RuleOptions) -> Iterator[str]:
    """Admit the allowed sources. Other packets are not DNATed and dropped in table filter."""
    comment, target = f"{port.name} loadbalancer IP", names.external_chain(port.name)
    ranges = port.source_ranges or ()
    for cidr in ranges:
        yield rule(source=cidr, comment=comment, target=target)
    node_ip = ipaddress.ip_address(options.node_ip) if options.node_ip else None
    if any(node_ip in ipaddress.ip_network(cidr) for cidr in ranges if node_ip):
        # A node with the load balancer IP on an interface connects from that IP.
        for address in port.load_balancer_ips:
            yield rule(source=host(address), comment=comment, target=target)
    yield rule(comment=f"other traffic to {port.name} will be dropped by KUBE-PROXY-FIREWALL")


def _entries(source: _RuleInputs) -> Iterator[tuple[ChainKey, Rules]]:
    """Yield the service port's rules in shared chains: dispatch in nat, rejected or dropped packets in filter."""
    port, any_usable = source.port, source.selection.any_usable
    entries = (
        (skeleton.FILTER_SERVICES, _reject_internal(port, source.internal)),
        (skeleton.FILTER_EXTERNAL, _reject_external(port, source.external)),
        (skeleton.FILTER_NODEPORTS, _health_check(port)),
        (skeleton.FILTER_FIREWALL, _drop_other_sources(port) if any_usable else ()),
        (skeleton.NAT_SERVICES, _dispatch(port, any_usable, source.internal)),
        (skeleton.NAT_NODEPORTS, _node_port(port, source.options) if any_usable else ()),
    )
    return ((key, tuple(rules)) for key, rules in entries if rules)


def _dispatch(port: ServicePort, any_usable: bool, internal: _PolicyPath) -> list[str]:
    rules = [_to(port, port.cluster_ip, f"{port.name} cluster IP", internal.chain)] if internal.chain else []
    if any_usable:
        external = names.external_chain(port.name)
        balancer = names.firewall_chain(port.name) if _filters_sources(port) else external
        rules += [_to(port, ip, f"{port.name} external IP", external) for ip in port.external_ips]
        rules += [_to(port, ip, f"{port.name} loadbalancer IP", balancer) for ip in port.load_balancer_ips]
    return rules


def _node_port(port: ServicePort, options: RuleOptions) -> list[str]:
    """Return the rules for the node port; an nfacct object counts packets to 127.0.0.0/8 (kubernetes#125015)."""
    if not port.node_port:
        return []
    protocol, dport = port.protocol.value.lower(), _dport(port, port.node_port)
    comment, target = str(port.name), names.external_chain(port.name)
    rules = [rule(dport, protocol=protocol, comment=comment, target=target)]
    if options.localhost_node_ports and options.nfacct and not options.ipv6:
        counted, loopback = skeleton.nfacct_match(skeleton.LOCALHOST_ACCEPTED), "127.0.0.0/8"
        first = rule(dport, counted, destination=loopback, protocol=protocol, comment=comment, target=target)
        rules.insert(0, first)
    return rules


def _reject_internal(port: ServicePort, internal: _PolicyPath) -> list[str]:
    if not internal.filter_target:
        return []
    return [_to(port, port.cluster_ip, internal.filter_comment, internal.filter_target)]


def _reject_external(port: ServicePort, external: _PolicyPath) -> list[str]:
    comment, target = external.filter_comment, external.filter_target
    if not target:
        return []
    rules = [_to(port, ip, comment, target) for ip in (*port.external_ips, *port.load_balancer_ips)]
    if port.node_port:
        matches, protocol = "-m addrtype --dst-type LOCAL", port.protocol.value.lower()
        dport = _dport(port, port.node_port)
        rules.append(rule(matches, dport, protocol=protocol, comment=comment, target=target))
    return rules


def _health_check(port: ServicePort) -> list[str]:
    if not port.health_check_node_port:
        return []
    dport = f"-m tcp --dport {port.health_check_node_port}"
    return [rule(dport, protocol="tcp", comment=f"{port.name} health check node port", target="ACCEPT")]


def _drop_other_sources(port: ServicePort) -> list[str]:
    if not _filters_sources(port):
        return []
    comment = f"{port.name} traffic not accepted by {names.firewall_chain(port.name)}"
    return [_to(port, ip, comment, "DROP") for ip in port.load_balancer_ips]


def _to(port: ServicePort, address: str, comment: str, target: str, **source: str) -> str:
    return rule(
        _dport(port, port.port),
        **source,
        destination=host(address),
        protocol=port.protocol.value.lower(),
        comment=comment,
        target=target,
    )


def _dport(port: ServicePort, number: int) -> str:
    return f"-m {port.protocol.value.lower()} --dport {number}"


_AFFINITY_MASK = {False: "255.255.255.255", True: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}


# Above this many endpoints, first pick a group, then an endpoint of the group.
GROUPS_ABOVE = 128


def balance(
    port: ServicePort, chain: str, endpoints: Sequence[tuple[str, str]], options: RuleOptions
) -> Tree:
    """Return rules for `chain` that pick each endpoint with the same probability.

    `endpoints` are pairs of chain and target. A client with affinity returns to its last endpoint within
    `affinity_seconds`. The group of an endpoint depends on its target alone, so a new or removed endpoint changes only
    its own group and the probabilities.
    """
    choices = [_Choice(endpoint_chain, target, 1) for endpoint_chain, target in endpoints]
    affinity = tuple(_affinity_rules(port, choices, options))
    if options.dispatch is Dispatch.FLAT or len(endpoints) <= GROUPS_ABOVE:
        return Tree((*affinity, *_random_rules(port, choices, options)), ())
    groups = _groups(chain, choices)
    heads = [_Choice(name, f"{len(members)} endpoints", len(members)) for name, members in groups]
    return Tree(
        (*affinity, *_random_rules(port, heads, options)),
        tuple((name, tuple(_random_rules(port, members, options))) for name, members in groups),
    )


class _Choice(NamedTuple):
    """A chain to pick, its name in comments, and the number of its endpoints."""

    chain: str
    title: str
    weight: int


def _affinity_rules(port: ServicePort, choices: list[_Choice], options: RuleOptions) -> Iterator[str]:
    if port.affinity_seconds is not None:
        recent = f"-m recent --rcheck --seconds {port.affinity_seconds} --reap --name"
        mask = f"--mask {_AFFINITY_MASK[options.ipv6]} --rsource"
        for choice in choices:
            yield f"{_comment(port, choice, options)}{recent} {choice.chain} {mask} -j {choice.chain}"


def _random_rules(port: ServicePort, choices: list[_Choice], options: RuleOptions) -> Iterator[str]:
    """Yield a rule for each choice, with its share of the endpoints not picked yet; the last one takes the rest."""
    left = sum(choice.weight for choice in choices)
    for choice in choices:
        share = ""
        if choice.weight < left:
            share = f"-m statistic --mode random --probability {probability(choice.weight, left)} "
        yield f"{_comment(port, choice, options)}{share}-j {choice.chain}"
        left -= choice.weight


def _comment(port: ServicePort, choice: _Choice, options: RuleOptions) -> str:
    return "" if options.large_cluster else f'-m comment --comment "{port.name} -> {choice.title}" '


def _groups(chain: str, choices: list[_Choice]) -> list[tuple[str, list[_Choice]]]:
    """Divide n choices into about sqrt(n) groups; powers of two keep the number of groups stable."""
    count = 1 << round(math.log2(len(choices)) / 2)
    members: dict[int, list[_Choice]] = {}
    for choice in choices:
        members.setdefault(zlib.crc32(choice.title.encode()) % count, []).append(choice)
    return [(names.branch_chain(f"{chain} {i} of {count}"), members[i]) for i in sorted(members)]


def endpoint_chains(
    port: ServicePort, endpoints: Iterable[tuple[str, ResolvedEndpoint]], options: RuleOptions
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the chain of each endpoint: masquerade its own packets (hairpin), then DNAT.

    `endpoints` are pairs of chain and endpoint.
    """
    comment = "" if options.large_cluster else f'-m comment --comment "{port.name}" '
    protocol, ipv6 = port.protocol.value.lower(), options.ipv6
    for chain, endpoint in endpoints:
        affinity = ""
        if port.affinity_seconds is not None:
            affinity = f"-m recent --set --name {chain} --mask {_AFFINITY_MASK[ipv6]} --rsource "
        address = endpoint.endpoint.address
        destination = f"[{printed(address)}]:{endpoint.port}" if ipv6 else endpoint.target
        yield (
            chain,
            (
                f"-s {host(address)} {comment}-j {names.MARK_MASQ}",
                f"-p {protocol} {comment}{affinity}-m {protocol} -j DNAT --to-destination {destination}",
            ),
        )
