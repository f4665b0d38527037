"""The chains that services share: each service port's entries, in a fixed order or in a tree, then the node ports."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping

from pykubeproxy.config import Dispatch
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.service import Entries, Rules
from pykubeproxy.rules.text import host, rule
from pykubeproxy.rules.tree import Branch, Prefix, Tree, grow

_NODE_PORTS_COMMENT = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"


# In more addresses, or ports, than this a packet is better found its way by a tree.
TREE_ABOVE = 200

_PORT = re.compile(r"-p (\w+) .*--dport (\d+)")
_Entry = tuple[str, int]  # what tells trees apart, and the number that is looked for


def shared_chain(
    key: ChainKey, ports: Iterable[Entries], node_port_jumps: Rules, dispatch: Dispatch = Dispatch.FLAT
) -> Tree:
    """The rules of one shared chain; `ports` are the service ports' entries in the order of their names.

    Of table nat the chain may be the root of a tree; table filter holds only services without usable endpoints and
    firewalled addresses, so it stays flat.
    """
    rules = [text for entries in ports for chain, rules in entries if chain == key for text in rules]
    if key == skeleton.NAT_SERVICES:
        # First come cluster IPs, so that nobody takes one over by naming it as an external IP (CVE-2020-8554).
        rules.sort(key=_is_for_others)
    tree = Tree(tuple(rules), ())
    if key.table == "nat" and dispatch is not Dispatch.FLAT:
        numbered = _by_number(key, rules)
        if dispatch is Dispatch.TREE or sum(map(len, numbered.values())) > TREE_ABOVE:
            tree = _grown(key, numbered)
    if key == skeleton.NAT_SERVICES:
        return Tree((*tree.root, *node_port_jumps), tree.chains)
    return tree


def _is_for_others(text: str) -> bool:
    return ' cluster IP" ' not in text


def _by_number(key: ChainKey, rules: Iterable[str]) -> dict[str, dict[int, Rules]]:
    """Rules by the number that they are for: in KUBE-SERVICES the address, in KUBE-NODEPORTS protocol and port."""
    number = _address if key == skeleton.NAT_SERVICES else _port
    found: dict[str, dict[int, list[str]]] = {}
    for text in rules:
        of, value = number(text)
        found.setdefault(of, {}).setdefault(value, []).append(text)
    return {of: {value: tuple(texts) for value, texts in entries.items()} for of, entries in found.items()}


def _address(text: str) -> _Entry:
    return "", int(ipaddress.ip_address(text.split(" ", 2)[1].partition("/")[0]))


def _port(text: str) -> _Entry:
    match = _PORT.search(text)
    assert match, f"no protocol and port in {text}"
    return match[1], int(match[2])


def _grown(key: ChainKey, numbered: Mapping[str, Mapping[int, Rules]]) -> Tree:
    if key == skeleton.NAT_SERVICES:
        entries = numbered.get("", {})
        ipv6 = any(":" in rules[0].split(" ", 2)[1] for rules in entries.values())
        return grow(entries, 128 if ipv6 else 32, _address_branch)
    trees = [grow(numbered[protocol], 16, _port_branch(protocol)) for protocol in sorted(numbered)]
    return Tree(
        tuple(rule for tree in trees for rule in tree.root),
        tuple(chain for tree in trees for chain in tree.chains),
    )


def _address_branch(prefix: Prefix) -> Branch:
    network_of = ipaddress.IPv6Network if prefix.width == 128 else ipaddress.IPv4Network
    network = str(network_of((prefix.bits, prefix.length)))
    name = names.branch_chain(f"{names.SERVICES} {network}")
    return Branch(name, rule(destination=network, target=name), rule(comment=f"services at {network}"))


def _port_branch(protocol: str) -> Callable[[Prefix], Branch]:
    def branch(prefix: Prefix) -> Branch:
        name = names.branch_chain(f"{names.NODEPORTS} {protocol} {prefix.bits}-{prefix.last}")
        ports = f"-m {protocol} --dport {prefix.bits}:{prefix.last}"
        note = rule(comment=f"{protocol} node ports {prefix.bits}-{prefix.last}")
        return Branch(name, rule(ports, protocol=protocol, target=name), note)

    return branch


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
