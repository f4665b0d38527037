"""Render the chains that services share, flat or as a tree, and the jumps to node ports."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from pykubeproxy.config import Dispatch
from pykubeproxy.objects import Key
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.parse import parse_target
from pykubeproxy.rules.ruleset import ChainKey, Ruleset, without
from pykubeproxy.rules.service import Entries, Rules
from pykubeproxy.rules.text import host, rule
from pykubeproxy.rules.tree import LEVELS, Area, Branch, Prefix, Tree, build_tree

_NODE_PORTS_COMMENT = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"

# Above this many addresses, or node ports, dispatch by tree. Also above this many rules: a Service may have thousands of
# ports at one address.
TREE_ABOVE = 200
_TREE_ABOVE_RULES = 1000
# An address with more rules has a tree by port, with up to so many ports in a leaf. A new chain costs iptables more than
# many rules, and only packets to this address visit them.
PORTS_LEAF = 256
# At most `tree.LEVELS` together: of the tree of such addresses, their own chains, and the trees by port. With more than
# LEAF * 8**2 such addresses, a quarter of a million rules, leaves get longer.
_LEVELS_ABOVE, _LEVELS_BELOW = 2, 3

_PORT = re.compile(
    r'(?:-d \S+ )?-p (\w+) (?:-m comment --comment "[^"]*" )?(?:-m addrtype --dst-type LOCAL )?-m \w+ --dport (\d+)(?: |$)'
)
# An entry for a UDP service port: with -d for an address, without for a node port.
_UDP_ENTRY = re.compile(r"(?:-d (\S+)/(?:32|128) )?-p udp .*--dport (\d+) -j KUBE-(?:SVC|SVL|EXT|FW)-")
_ANY_ADDRESS = ""
# Names before and after those of all Services.
_FIRST, _LAST = Key("", ""), Key("~", "")


def shared_chain(
    key: ChainKey, ports: Iterable[Entries], node_port_jumps: Rules, dispatch: Dispatch = Dispatch.FLAT
) -> Tree:
    """Return the rules of one shared chain; `ports` are the entries of the service ports, sorted by name."""
    return SharedEntries(key).replacing({_FIRST: rules_in(key, ports)}).arranged(node_port_jumps, dispatch)


def rules_in(key: ChainKey, ports: Iterable[Entries]) -> Rules:
    """Return the rules of service ports in one shared chain."""
    return tuple([text for entries in ports for chain, rules in entries if chain == key for text in rules])


class _Group(msgspec.Struct, frozen=True):
    """The entries of one address in a shared chain: of each Service, all in order, and arranged by port if they are many.

    `number` is the address. `destinations` counts ports if the entries have no address.
    """

    services: tuple[tuple[Key, Rules], ...]
    rules: Rules
    tree: Tree
    number: int
    destinations: int


class SharedEntries(msgspec.Struct, frozen=True):
    """The entries of all Services in one shared chain, grouped by address.

    Values share the groups in which they do not differ, so replacing some entries costs only what concerns their
    addresses.
    """

    key: ChainKey
    services: Mapping[Key, Rules] = {}
    groups: Mapping[str, _Group] = {}

    def replacing(self, services: Mapping[Key, Rules]) -> "SharedEntries":
        """Return the entries with those of these Services instead of theirs."""
        changed: dict[str, dict[Key, Rules]] = {}
        for service, rules in services.items():
            before = self.services.get(service, ())
            if rules == before:
                continue
            now = _by_address(rules)
            for address in now.keys() | _by_address(before).keys():
                if address not in changed:
                    changed[address] = dict(self.groups[address].services) if address in self.groups else {}
                changed[address].pop(service, None)
                if address in now:
                    changed[address][service] = now[address]
        groups = {
            **self.groups,
            **{it: _group(self.key, it, rules) for it, rules in changed.items() if rules},
        }
        for address in [it for it, rules in changed.items() if not rules]:
            del groups[address]
        left = {service: rules for service, rules in {**self.services, **services}.items() if rules}
        return SharedEntries(self.key, left, groups)

    def lost(self, applied: "SharedEntries") -> Rules:
        """Return the applied entries that are not among these."""
        return tuple(
            text
            for address, group in applied.groups.items()
            if group is not (now := self.groups.get(address))
            for text in without(group.rules, now.rules if now else ())
        )

    def with_lost(self, lost: Rules) -> "SharedEntries":
        """Return the entries with lost ones behind them."""
        return self.replacing({_LAST: lost})

    def arranged(self, node_port_jumps: Rules, dispatch: Dispatch) -> Tree:
        """Arrange the entries, flat or as a tree, before the jumps to node ports."""
        made = self._tree() if self._needs_tree(dispatch) else Tree(self._flat(), ())
        if self.key == skeleton.NAT_SERVICES:
            return Tree((*made.root, *node_port_jumps), made.chains)
        return made

    def _needs_tree(self, dispatch: Dispatch) -> bool:
        if dispatch is not Dispatch.AUTO:
            return dispatch is Dispatch.TREE
        groups = self.groups.values()
        return (
            sum(group.destinations for group in groups) > TREE_ABOVE
            or sum(len(group.rules) for group in groups) > _TREE_ABOVE_RULES
        )

    def _flat(self) -> Rules:
        return _ordered(self.key, (self.services[service] for service in sorted(self.services)))

    def _tree(self) -> Tree:
        """Dispatch by address, then rules without an address by port."""
        groups = dict(self.groups)
        others = groups.pop(_ANY_ADDRESS).tree if _ANY_ADDRESS in groups else Tree((), ())
        width = 128 if any(":" in address for address in groups) else 32
        small, large = (
            {
                group.number: group.tree.root
                for group in groups.values()
                if bool(group.tree.chains) is is_large
            }
            for is_large in (False, True)
        )
        # Packets to other addresses find their rules before those with many ports.
        one = build_tree(small, width, _address_branch(self.key, "services"), elsewhere=large)
        two = build_tree(large, width, _address_branch(self.key, "ports"), levels=_LEVELS_ABOVE)
        below = [chain for group in groups.values() for chain in group.tree.chains]
        return Tree((*one.root, *two.root, *others.root), (*below, *one.chains, *two.chains, *others.chains))


def _group(key: ChainKey, address: str, services: Mapping[Key, Rules]) -> _Group:
    """Group entries of one address. Arrange those without an address by port, and many of one address."""
    ordered = tuple((service, services[service]) for service in sorted(services))
    rules = _ordered(key, (rules for _, rules in ordered))
    if address == _ANY_ADDRESS:
        by_port = _by_port(rules)
        tree = _port_tree(key, address, by_port)
        return _Group(ordered, rules, tree, 0, sum(map(len, by_port.values())))
    tree, at = Tree(rules, ()), ipaddress.ip_address(address.partition("/")[0])
    if len(rules) > PORTS_LEAF:
        ports = _port_tree(key, address, _by_port(rules), PORTS_LEAF, _LEVELS_BELOW)
        whole = Prefix(int(at), at.max_prefixlen, at.max_prefixlen)
        own = _address_branch(key, "ports")(Area(whole, (), 0))
        tree = Tree((own.jump,), (*ports.chains, (own.name, (*ports.root, own.note))))
    return _Group(ordered, rules, tree, int(at), 1)


def _ordered(key: ChainKey, rules: Iterable[Rules]) -> Rules:
    """Return the rules of Services, in order of their names, in the order of a flat chain."""
    found = [text for some in rules for text in some]
    if key == skeleton.NAT_SERVICES:
        # Cluster IPs go first: no Service may hijack one as its external IP (CVE-2020-8554).
        found.sort(key=_is_no_cluster_ip)
    return tuple(found)


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


def _by_address(rules: Rules) -> dict[str, Rules]:
    """Group rules by their single destination address, such as "10.96.0.1/32"; `_ANY_ADDRESS` if they have none."""
    groups: dict[str, list[str]] = {}
    for text in rules:
        address = text[3 : text.index(" ", 3)] if text.startswith("-d ") else _ANY_ADDRESS
        is_single = address.endswith("/128" if ":" in address else "/32")
        groups.setdefault(address if is_single else _ANY_ADDRESS, []).append(text)
    # Most Services have one address.
    return {address: rules if len(groups) == 1 else tuple(texts) for address, texts in groups.items()}


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


def _port_tree(
    key: ChainKey,
    address: str,
    by_port: Mapping[str, Mapping[int, Rules]],
    leaf: int = 0,
    levels: int = LEVELS,
) -> Tree:
    """Dispatch the rules of one address by port; rules without a port go first."""
    trees = [
        build_tree(by_port[protocol], 16, _port_branch(key, address, protocol), leaf, levels)
        for protocol in sorted(by_port)
    ]
    return Tree(
        tuple(text for made in trees for text in made.root),
        tuple(chain for made in trees for chain in made.chains),
    )


def _address_branch(key: ChainKey, of: Literal["services", "ports"]) -> Callable[[Area], Branch]:
    """Name the branches of two trees differently: an address may move from one to the other."""

    def branch(area: Area) -> Branch:
        prefix = area.prefix
        network_of = ipaddress.IPv6Network if prefix.width == 128 else ipaddress.IPv4Network
        network = str(network_of((prefix.bits, prefix.length)))
        name = _branch_chain(key, f"{network}{area.suffix}{' ports' if of == 'ports' else ''}")
        return Branch(name, rule(destination=network, target=name), rule(comment=f"{of} at {network}"))

    return branch


def _port_branch(key: ChainKey, address: str, protocol: str) -> Callable[[Area], Branch]:
    def branch(area: Area) -> Branch:
        prefix = area.prefix
        between = f"{prefix.bits}-{prefix.last}"
        name = _branch_chain(key, f"{address} {protocol} {between}{area.suffix}".lstrip())
        at = address.partition("/")[0]
        note = f"{protocol} ports {between} at {at}" if at else f"{protocol} node ports {between}"
        # iptables-save prints a single port without a range. The comment tells the jump from a rule of a service port.
        single = prefix.bits == prefix.last
        ports = f"-m {protocol} --dport {prefix.bits}" + ("" if single else f":{prefix.last}")
        comment = note if single else ""
        jump = rule(ports, destination=address, protocol=protocol, comment=comment, target=name)
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
