"""Render the chains that services share, flat or as a tree, and the jumps to node ports."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping

from pykubeproxy.config import Dispatch
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import Entries, Rules
from pykubeproxy.rules.text import host, rule
from pykubeproxy.rules.tree import Area, Branch, Tree, build_tree

_NODE_PORTS_COMMENT = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"

# Above this many addresses, or node ports, dispatch by tree. Also above this many rules: a Service may have thousands of
# ports at one address.
TREE_ABOVE = 200
_TREE_ABOVE_RULES = 1000

_PORT = re.compile(r"-p (\w+) .*--dport (\d+)")
# An entry for a UDP service port: with -d for an address, without for a node port.
_UDP_ENTRY = re.compile(r"(?:-d (\S+)/(?:32|128) )?-p udp .*--dport (\d+) -j KUBE-(?:SVC|SVL|EXT|FW)-")
_Entry = tuple[str, int]  # the protocol, "" for addresses, and the address or port


def shared_chain(
    key: ChainKey, ports: Iterable[Entries], node_port_jumps: Rules, dispatch: Dispatch = Dispatch.FLAT
) -> Tree:
    """Return the rules of one shared chain; `ports` are the entries of the service ports, sorted by name.

    Only chains of table nat become trees: table filter has few entries.
    """
    rules = [text for entries in ports for chain, rules in entries if chain == key for text in rules]
    if key == skeleton.NAT_SERVICES:
        # Cluster IPs go first: no Service may hijack one as its external IP (CVE-2020-8554).
        rules.sort(key=_is_no_cluster_ip)
    tree = Tree(tuple(rules), ())
    if key.table == "nat" and dispatch is not Dispatch.FLAT:
        numbered = _by_number(key, rules)
        many = sum(map(len, numbered.values())) > TREE_ABOVE or len(rules) > _TREE_ABOVE_RULES
        if many or dispatch is Dispatch.TREE:
            tree = _tree(key, numbered)
    if key == skeleton.NAT_SERVICES:
        return Tree((*tree.root, *node_port_jumps), tree.chains)
    return tree


def _is_no_cluster_ip(text: str) -> bool:
    return ' cluster IP" ' not in text


def _by_number(key: ChainKey, rules: Iterable[str]) -> dict[str, dict[int, Rules]]:
    """Group rules by address in KUBE-SERVICES, by protocol and port in KUBE-NODEPORTS."""
    number = _address if key == skeleton.NAT_SERVICES else _port
    groups: dict[str, dict[int, list[str]]] = {}
    for text in rules:
        protocol, value = number(text)
        groups.setdefault(protocol, {}).setdefault(value, []).append(text)
    return {
        protocol: {value: tuple(texts) for value, texts in entries.items()}
        for protocol, entries in groups.items()
    }


def _address(text: str) -> _Entry:
    return "", int(ipaddress.ip_address(text.split(" ", 2)[1].partition("/")[0]))


def _port(text: str) -> _Entry:
    match = _PORT.search(text)
    assert match, f"no protocol and port in {text}"
    return match[1], int(match[2])


def _tree(key: ChainKey, numbered: Mapping[str, Mapping[int, Rules]]) -> Tree:
    if key == skeleton.NAT_SERVICES:
        entries = numbered.get("", {})
        ipv6 = any(":" in rules[0].split(" ", 2)[1] for rules in entries.values())
        return build_tree(entries, 128 if ipv6 else 32, _address_branch)
    trees = [build_tree(numbered[protocol], 16, _port_branch(protocol)) for protocol in sorted(numbered)]
    return Tree(
        tuple(rule for tree in trees for rule in tree.root),
        tuple(chain for tree in trees for chain in tree.chains),
    )


def _address_branch(area: Area) -> Branch:
    prefix = area.prefix
    network_of = ipaddress.IPv6Network if prefix.width == 128 else ipaddress.IPv4Network
    network = str(network_of((prefix.bits, prefix.length)))
    name = names.branch_chain(f"{names.SERVICES} {network}{area.suffix}")
    return Branch(name, rule(destination=network, target=name), rule(comment=f"services at {network}"))


def _port_branch(protocol: str) -> Callable[[Area], Branch]:
    def branch(area: Area) -> Branch:
        prefix = area.prefix
        between = f"{prefix.bits}-{prefix.last}"
        name = names.branch_chain(f"{names.NODEPORTS} {protocol} {between}{area.suffix}")
        ports = f"-m {protocol} --dport {prefix.bits}:{prefix.last}"
        note = rule(comment=f"{protocol} node ports {between}")
        return Branch(name, rule(ports, protocol=protocol, target=name), note)

    return branch


def node_port_jumps(networks: tuple[str, ...], local_addresses: Iterable[str], options: RuleOptions) -> Rules:
    """Return the last rules of KUBE-SERVICES, which jump to the node ports.

    `networks` are the nodePortAddresses of this family. If there are none, or one is "/0", one rule covers all
    addresses of this node; else each of `local_addresses` in them gets a rule. Loopback is included only on IPv4 with
    localhostNodePorts.
    """
    include_loopback = options.localhost_node_ports and not options.ipv6
    if not networks or any(cidr.endswith("/0") for cidr in networks):
        loopback = "::1/128" if options.ipv6 else "127.0.0.0/8"
        destination = "" if include_loopback else f"! {loopback}"
        return (_jump("-m addrtype --dst-type LOCAL", destination=destination),)
    parsed = [ipaddress.ip_network(cidr) for cidr in networks]
    addresses = {ipaddress.ip_address(address) for address in local_addresses}
    return tuple(
        _jump(destination=host(str(address)))
        for address in sorted(addresses, key=int)
        if any(address in network for network in parsed) and (include_loopback or not address.is_loopback)
    )


def serves_loopback(networks: tuple[str, ...]) -> bool:
    """Return whether the IPv4 networks of nodePortAddresses include 127.0.0.0/8."""
    parsed = [ipaddress.ip_network(cidr) for cidr in networks]
    return not parsed or any(
        n.network_address.is_loopback or ipaddress.ip_address("127.0.0.0") in n for n in parsed
    )


def udp_frontends(live: Ruleset) -> frozenset[tuple[str, int]]:
    """Return address and port of each UDP frontend in live tables, of any proxy; the address is "" for node ports.

    After a restart, only these rules show which deleted services may still have flows.
    """
    matches = (
        _UDP_ENTRY.match(rule)
        for chain, rules in live.of_table("nat")
        if chain.startswith("KUBE-")
        for rule in rules
        if "-p udp" in rule
    )
    return frozenset((match[1] or "", int(match[2])) for match in matches if match)


def _jump(match: str = "", destination: str = "") -> str:
    return rule(match, destination=destination, comment=_NODE_PORTS_COMMENT, target=names.NODEPORTS)
