"""The chains that services share: each service port's entries in a fixed order, then the jumps to the node ports."""

import ipaddress
from collections.abc import Iterable

from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.service import Entries, Rules
from pykubeproxy.rules.text import host, rule

_NODE_PORTS_COMMENT = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"


def shared_chain(key: ChainKey, ports: Iterable[Entries], node_port_jumps: Rules) -> Rules:
    """The rules of one shared chain; `ports` are the service ports' entries in the order of their names."""
    rules = [rule for entries in ports for chain, rules in entries if chain == key for rule in rules]
    return (*rules, *node_port_jumps) if key == skeleton.NAT_SERVICES else tuple(rules)


def node_port_jumps(wanted: tuple[str, ...], local_addresses: Iterable[str], options: RuleOptions) -> Rules:
    """The last rules of KUBE-SERVICES, which lead to the node ports.

    `wanted` are the networks of nodePortAddresses in this family; none, or one that holds every address, means all of
    this node's addresses. Otherwise each of `local_addresses` that lies in them gets a rule. Loopback is left out where
    node ports cannot answer there: on IPv6 always, on IPv4 with localhostNodePorts off.
    """
    loopback_too = options.localhost_node_ports and not options.ipv6
    if not wanted or any(cidr.endswith("/0") for cidr in wanted):
        loopback = "::1/128" if options.ipv6 else "127.0.0.0/8"
        destination = "" if loopback_too else f"! {loopback}"
        return (_jump("-m addrtype --dst-type LOCAL", destination=destination),)
    networks = [ipaddress.ip_network(cidr) for cidr in wanted]
    addresses = {ipaddress.ip_address(address) for address in local_addresses}
    return tuple(
        _jump(destination=host(str(address)))
        for address in sorted(addresses, key=int)
        if any(address in network for network in networks) and (loopback_too or not address.is_loopback)
    )


def serves_loopback(wanted: tuple[str, ...]) -> bool:
    """Whether nodePortAddresses, here the IPv4 networks of it, take in 127.0.0.0/8."""
    networks = [ipaddress.ip_network(cidr) for cidr in wanted]
    return not networks or any(
        n.network_address.is_loopback or ipaddress.ip_address("127.0.0.0") in n for n in networks
    )


def _jump(match: str = "", destination: str = "") -> str:
    return rule(match, destination=destination, comment=_NODE_PORTS_COMMENT, target=names.NODEPORTS)
