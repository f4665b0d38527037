"""All rules of one service port: the chains of its own and its entries in the chains that services share."""

import ipaddress
from collections.abc import Iterable, Iterator

import msgspec

from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.again import Again
from pykubeproxy.rules.balancing import balance, endpoint_rules
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.text import from_local, host, not_from_local, rule
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import ServicePort
from pykubeproxy.services.selection import Selection

Rules = tuple[str, ...]
# What a service port has in chains that services share.
Entries = tuple[tuple[ChainKey, Rules], ...]

# How the comments end of what stands in the tables for a service port that is set aside.
SET_ASIDE = "is set aside"


class PortRules(msgspec.Struct, frozen=True):
    """The rules of one service port: `chains` of table nat that are its own, and `entries` in shared chains.

    The chains may be rendered as they are read, and anew each time.
    """

    chains: Iterable[tuple[str, Rules]]
    entries: Entries


class _Path(msgspec.Struct, frozen=True):
    """Where the traffic of one policy goes: the chain that balances it, or "" and why it is not to be had."""

    chain: str
    refusal: str  # the target of the filter rule, "" if there is a chain
    complaint: str  # that rule's comment


def port_rules(port: ServicePort, selection: Selection, options: RuleOptions) -> PortRules:
    """Write the rules of one service port for the backends that were selected."""
    cluster = _path(port, names.cluster_chain(port.name), selection.cluster, selection.any_usable, options)
    local = _path(port, names.local_chain(port.name), selection.local, selection.any_usable, options)
    internal = local if port.internal_local else cluster
    external = local if port.external_local else cluster
    return PortRules(
        chains=Again(lambda: _chains(port, selection, internal, external, options)),
        entries=tuple(_entries(port, selection.any_usable, internal, external, options)),
    )


def refusing_rules(port: ServicePort, options: RuleOptions) -> PortRules:
    """The rules of a service port that is set aside: whoever comes to it anew is refused at once, as without endpoints.

    Its last rules are not kept: they may lead to addresses that are other pods' by now, or let through sources that are
    no longer allowed.
    """
    path = _Path("", _reject(options), f"{port.name} {SET_ASIDE}")
    chains = (
        (skeleton.FILTER_SERVICES, _refused_internal(port, path)),
        (skeleton.FILTER_EXTERNAL, _refused_external(port, path)),
        (skeleton.FILTER_NODEPORTS, _health_check(port)),
    )
    return PortRules((), tuple((key, tuple(rules)) for key, rules in chains if rules))


def note_rules(port: ServicePort) -> PortRules:
    """A rule of no effect that tells of a service port that is set aside, where not even its refusal can be written."""
    note = rule(
        destination=host(port.cluster_ip),
        protocol=port.protocol.value.lower(),
        comment=f"{port.name} port {port.port} {SET_ASIDE}",
    )
    return PortRules((), ((skeleton.FILTER_SERVICES, (note,)),))


def _path(
    port: ServicePort,
    chain: str,
    backends: tuple[ResolvedEndpoint, ...],
    any_usable: bool,
    options: RuleOptions,
) -> _Path:
    """Without a backend anywhere clients are refused; with some elsewhere, packets for local ones are dropped."""
    if backends:
        return _Path(chain, "", "")
    if any_usable:
        return _Path("", "DROP", f"{port.name} has no local endpoints")
    return _Path("", _reject(options), f"{port.name} has no endpoints")


def _reject(options: RuleOptions) -> str:
    return f"REJECT --reject-with {'icmp6-port-unreachable' if options.ipv6 else 'icmp-port-unreachable'}"


def _chains(
    port: ServicePort, selection: Selection, internal: _Path, external: _Path, options: RuleOptions
) -> Iterator[tuple[str, Rules]]:
    """The chains of this service port alone, each before those it jumps to."""
    if selection.any_usable and port.externally_accessible:
        if _filters_sources(port):
            yield names.firewall_chain(port.name), tuple(_firewall(port, options))
        yield names.external_chain(port.name), tuple(_external(port, external, options))
    targets = {it.target: names.endpoint_chain(port.name, it.target) for it in selection.reachable}
    for used, chain, backends in (
        (port.uses_cluster_endpoints, names.cluster_chain(port.name), selection.cluster),
        (port.uses_local_endpoints, names.local_chain(port.name), selection.local),
    ):
        if used and backends:
            marking = _masquerade_internal(port, options) if chain == internal.chain else ""
            balanced = balance(port, chain, [(targets[it.target], it.target) for it in backends], options)
            yield chain, (*([marking] if marking else []), *balanced.root)
            yield from balanced.chains
    for backend in selection.reachable:
        chain = targets[backend.target]
        yield chain, endpoint_rules(port, backend, chain, options)


def _masquerade_internal(port: ServicePort, options: RuleOptions) -> str:
    """Packets to the cluster IP that come from outside the cluster have to come back through this node."""
    sources: dict[str, str] | None = None
    if options.masquerade_all:
        sources = {}
    elif options.local_traffic:
        sources = not_from_local(options.local_traffic)
    if sources is None:
        return ""
    return rule(
        _dport(port, port.port),
        **sources,
        destination=host(port.cluster_ip),
        protocol=port.protocol.value.lower(),
        comment=f"{port.name} cluster IP",
        target=names.MARK_MASQ,
    )


def _external(port: ServicePort, external: _Path, options: RuleOptions) -> Iterator[str]:
    """What arrives at a node port, an external IP or a load balancer's IP.

    Under policy Cluster the packet may leave for another node, so its answer has to come back here: masquerade. Under
    Local the client's address is kept. Pods of this node and the node itself are not what policy Local is for: they
    get any backend, and the node's own packets are masqueraded, for its address at the service's IP means nothing to a
    backend elsewhere.
    """
    title = f"{port.name} external destinations"
    if not port.external_local:
        yield rule(comment=f"masquerade traffic for {title}", target=names.MARK_MASQ)
    else:
        anywhere = names.cluster_chain(port.name)
        if options.local_traffic:
            yield rule(
                **from_local(options.local_traffic), comment=f"pod traffic for {title}", target=anywhere
            )
        here = "-m addrtype --src-type LOCAL"
        yield rule(here, comment=f"masquerade LOCAL traffic for {title}", target=names.MARK_MASQ)
        yield rule(here, comment=f"route LOCAL traffic for {title}", target=anywhere)
    if external.chain:
        yield rule(target=external.chain)


def _filters_sources(port: ServicePort) -> bool:
    return bool(port.load_balancer_ips and port.source_ranges)


def _firewall(port: ServicePort, options: RuleOptions) -> Iterator[str]:
    """Let the allowed sources through; who reaches the end is not translated and meets DROP in table filter."""
    comment, target = f"{port.name} loadbalancer IP", names.external_chain(port.name)
    for cidr in port.source_ranges:
        yield rule(source=cidr, comment=comment, target=target)
    if any(_contains(cidr, options.node_ip) for cidr in port.source_ranges):
        # A node that has the balancer's IP on an interface of its own reaches it with that IP as source.
        for address in port.load_balancer_ips:
            yield rule(source=host(address), comment=comment, target=target)
    yield rule(comment=f"other traffic to {port.name} will be dropped by KUBE-PROXY-FIREWALL")


def _entries(
    port: ServicePort, any_usable: bool, internal: _Path, external: _Path, options: RuleOptions
) -> Iterator[tuple[ChainKey, Rules]]:
    """This service port's rules in the shared chains: in nat where packets go, in filter those that go nowhere."""
    entries = (
        (skeleton.FILTER_SERVICES, _refused_internal(port, internal)),
        (skeleton.FILTER_EXTERNAL, _refused_external(port, external)),
        (skeleton.FILTER_NODEPORTS, _health_check(port)),
        (skeleton.FILTER_FIREWALL, _filtered_sources(port) if any_usable else ()),
        (skeleton.NAT_SERVICES, _dispatch(port, any_usable, internal)),
        (skeleton.NAT_NODEPORTS, _node_port(port, options) if any_usable else ()),
    )
    return ((key, tuple(rules)) for key, rules in entries if rules)


def _dispatch(port: ServicePort, any_usable: bool, internal: _Path) -> list[str]:
    rules = [_to(port, port.cluster_ip, "cluster IP", internal.chain)] if internal.chain else []
    if any_usable:
        external = names.external_chain(port.name)
        balancer = names.firewall_chain(port.name) if _filters_sources(port) else external
        rules += [_to(port, address, "external IP", external) for address in port.external_ips]
        rules += [_to(port, address, "loadbalancer IP", balancer) for address in port.load_balancer_ips]
    return rules


def _node_port(port: ServicePort, options: RuleOptions) -> list[str]:
    """The node port; packets to 127.0.0.0/8 are counted apart, since who relies on them should know (KEP-3178)."""
    if not port.node_port:
        return []
    external = names.external_chain(port.name)
    protocol, dport = port.protocol.value.lower(), _dport(port, port.node_port)
    rules = [rule(dport, protocol=protocol, comment=str(port.name), target=external)]
    if options.localhost_node_ports and options.nfacct and not options.ipv6:
        counted = skeleton.nfacct_match(skeleton.LOCALHOST_ACCEPTED)
        loopback = "127.0.0.0/8"
        rules.insert(
            0,
            rule(
                dport,
                counted,
                destination=loopback,
                protocol=protocol,
                comment=str(port.name),
                target=external,
            ),
        )
    return rules


def _refused_internal(port: ServicePort, internal: _Path) -> list[str]:
    if not internal.refusal:
        return []
    return [_to(port, port.cluster_ip, "", internal.refusal, comment=internal.complaint)]


def _refused_external(port: ServicePort, external: _Path) -> list[str]:
    if not external.refusal:
        return []
    addresses = (*port.external_ips, *port.load_balancer_ips)
    rules = [_to(port, address, "", external.refusal, comment=external.complaint) for address in addresses]
    if port.node_port:
        rules.append(
            rule(
                "-m addrtype --dst-type LOCAL",
                _dport(port, port.node_port),
                protocol=port.protocol.value.lower(),
                comment=external.complaint,
                target=external.refusal,
            )
        )
    return rules


def _health_check(port: ServicePort) -> list[str]:
    if not port.health_check_node_port:
        return []
    dport = f"-m tcp --dport {port.health_check_node_port}"
    return [rule(dport, protocol="tcp", comment=f"{port.name} health check node port", target="ACCEPT")]


def _filtered_sources(port: ServicePort) -> list[str]:
    if not _filters_sources(port):
        return []
    comment = f"{port.name} traffic not accepted by {names.firewall_chain(port.name)}"
    return [_to(port, address, "", "DROP", comment=comment) for address in port.load_balancer_ips]


def _to(port: ServicePort, address: str, kind: str, target: str, comment: str = "") -> str:
    return rule(
        _dport(port, port.port),
        destination=host(address),
        protocol=port.protocol.value.lower(),
        comment=comment or f"{port.name} {kind}",
        target=target,
    )


def _dport(port: ServicePort, number: int) -> str:
    return f"-m {port.protocol.value.lower()} --dport {number}"


def _contains(cidr: str, address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address) in ipaddress.ip_network(cidr)
