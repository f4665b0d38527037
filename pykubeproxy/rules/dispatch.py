"""Render the chains that services share, flat or as a tree, and the jumps to node ports."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from pykubeproxy.config import Dispatch
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.parse import parse_target
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import Entries, Rules
from pykubeproxy.rules.text import host, rule
from pykubeproxy.rules.tree import Area, Branch, Tree, build_tree

_NODE_PORTS_COMMENT = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"

# Above this many addresses, or node ports, dispatch by tree. Also above this many rules: a Service may have thousands of
# ports at one address.
TREE_ABOVE = 200
_TREE_ABOVE_RULES = 1000
# The maximum of rules of one address in a chain of table filter. A new chain costs iptables more than many rules, and only
# packets to this address visit them.
PORTS_LEAF = 256

_PORT = re.compile(
    r'(?:-d \S+ )?-p (\w+) (?:-m comment --comment "[^"]*" )?(?:-m addrtype --dst-type LOCAL )?-m \w+ --dport (\d+)(?: |$)'
)
# An entry for a UDP service port: with -d for an address, without for a node port.
_UDP_ENTRY = re.compile(r"(?:-d (\S+)/(?:32|128) )?-p udp .*--dport (\d+) -j KUBE-(?:SVC|SVL|EXT|FW)-")
_ANY_ADDRESS = ""


def shared_chain(
    key: ChainKey, ports: Iterable[Entries], node_port_jumps: Rules, dispatch: Dispatch = Dispatch.FLAT
) -> Tree:
    """Return the rules of one shared chain; `ports` are the entries of the service ports, sorted by name."""
    return arranged(key, entries_of(key, ports), node_port_jumps, dispatch)


def entries_of(key: ChainKey, ports: Iterable[Entries]) -> Rules:
    """Return the rules of service ports in one shared chain, in the order of a flat chain."""
    rules = [text for entries in ports for chain, rules in entries if chain == key for text in rules]
    if key == skeleton.NAT_SERVICES:
        # Cluster IPs go first: no Service may hijack one as its external IP (CVE-2020-8554).
        rules.sort(key=_is_no_cluster_ip)
    return tuple(rules)


def arranged(key: ChainKey, rules: Rules, node_port_jumps: Rules, dispatch: Dispatch) -> Tree:
    """Arrange these entries of one shared chain, flat or as a tree, before the jumps to node ports."""
    made = Tree(rules, ())
    if dispatch is not Dispatch.FLAT:
        by_address = _by_address(rules)
        by_port = _by_port(by_address.pop(_ANY_ADDRESS, ()))
        destinations = len(by_address) + sum(map(len, by_port.values()))
        if destinations > TREE_ABOVE or len(rules) > _TREE_ABOVE_RULES or dispatch is Dispatch.TREE:
            made = _tree(key, by_address, by_port)
    if key == skeleton.NAT_SERVICES:
        return Tree((*made.root, *node_port_jumps), made.chains)
    return made


def with_branches(live: Ruleset, key: ChainKey) -> Mapping[ChainKey, Rules]:
    """Return a live shared chain of table filter and all branches below it, with their rules except jumps to branches."""
    found: dict[ChainKey, Rules] = {}
    waiting = [key]
    while waiting:
        chain = waiting.pop()
        targets = {text: parse_target(text) for text in live.chains.get(chain, ())}
        found[chain] = tuple(text for text, target in targets.items() if not names.is_owned(target))
        below = (ChainKey(key.table, target) for target in targets.values() if names.is_owned(target))
        waiting += (it for it in dict.fromkeys(below) if it not in found)
    return found


def _is_no_cluster_ip(text: str) -> bool:
    return ' cluster IP" ' not in text


def _by_address(rules: Rules) -> dict[str, list[str]]:
    """Group rules by their single destination address, such as "10.96.0.1/32"; `_ANY_ADDRESS` if they have none."""
    groups: dict[str, list[str]] = {}
    for text in rules:
        address = text[3 : text.index(" ", 3)] if text.startswith("-d ") else _ANY_ADDRESS
        is_single = address.endswith("/128" if ":" in address else "/32")
        groups.setdefault(address if is_single else _ANY_ADDRESS, []).append(text)
    return groups


def _by_port(rules: Iterable[str]) -> dict[str, dict[int, Rules]]:
    """Group rules by protocol and port; "" and 0 if they have none."""
    groups: dict[str, dict[int, list[str]]] = {}
    for text in rules:
        match = _PORT.match(text)
        protocol, port = (match[1], int(match[2])) if match else ("", 0)
        groups.setdefault(protocol, {}).setdefault(port, []).append(text)
    return {
        protocol: {port: tuple(texts) for port, texts in ports.items()} for protocol, ports in groups.items()
    }


def _tree(
    key: ChainKey, by_address: Mapping[str, Sequence[str]], by_port: Mapping[str, Mapping[int, Rules]]
) -> Tree:
    """Dispatch by address, then rules without an address by port.

    In table filter, also dispatch the many rules of one address by port. Table nat has no jumps left for that, see
    `tree.LEVELS`.
    """
    chains: list[tuple[str, Rules]] = []
    entries: dict[int, Rules] = {}
    for address, rules in by_address.items():
        entry = tuple(rules)
        if key.table == "filter" and len(rules) > PORTS_LEAF:
            below = _port_tree(key, address, _by_port(rules), PORTS_LEAF)
            entry = below.root
            chains += below.chains
        entries[int(ipaddress.ip_address(address.partition("/")[0]))] = entry
    width = 128 if any(":" in address for address in by_address) else 32
    addresses = build_tree(entries, width, _address_branch(key))
    ports = _port_tree(key, _ANY_ADDRESS, by_port)
    return Tree((*addresses.root, *ports.root), (*chains, *addresses.chains, *ports.chains))


def _port_tree(
    key: ChainKey, address: str, by_port: Mapping[str, Mapping[int, Rules]], leaf: int = 0
) -> Tree:
    """Dispatch the rules of one address by port; rules without a port go first."""
    trees = [
        build_tree(by_port[protocol], 16, _port_branch(key, address, protocol), leaf)
        for protocol in sorted(by_port)
    ]
    return Tree(
        tuple(text for made in trees for text in made.root),
        tuple(chain for made in trees for chain in made.chains),
    )


def _address_branch(key: ChainKey) -> Callable[[Area], Branch]:
    def branch(area: Area) -> Branch:
        prefix = area.prefix
        network_of = ipaddress.IPv6Network if prefix.width == 128 else ipaddress.IPv4Network
        network = str(network_of((prefix.bits, prefix.length)))
        name = _branch_chain(key, f"{network}{area.suffix}")
        return Branch(name, rule(destination=network, target=name), rule(comment=f"services at {network}"))

    return branch


def _port_branch(key: ChainKey, address: str, protocol: str) -> Callable[[Area], Branch]:
    def branch(area: Area) -> Branch:
        prefix = area.prefix
        between = f"{prefix.bits}-{prefix.last}"
        name = _branch_chain(key, f"{address} {protocol} {between}{area.suffix}".lstrip())
        ports = f"-m {protocol} --dport {prefix.bits}:{prefix.last}"
        at = address.partition("/")[0]
        note = f"{protocol} ports {between} at {at}" if at else f"{protocol} node ports {between}"
        jump = rule(ports, destination=address, protocol=protocol, target=name)
        return Branch(name, jump, rule(comment=note))

    return branch


def _branch_chain(key: ChainKey, area: str) -> str:
    """Return the name of a branch; branches of other tables have other names."""
    root = key.chain if key.table == "nat" else f"{key.table} {key.chain}"
    return names.branch_chain(f"{root} {area}")


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
