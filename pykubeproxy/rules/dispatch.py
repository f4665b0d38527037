"""Render the chains that services share, flat or as a tree, and the jumps to node ports.

In a flat chain, a packet visits all rules before its own. In the tree it visits at most about sixteen rules on each
level, and there are at most `LEVELS` levels. The tree is by number: an address or a port.

Usually a level branches on four bits of the number. Numbers with ever longer common prefixes would need a level for each
of them. Then a level branches by count: on prefixes of any length that divide the numbers evenly. The prefix of one
chain may contain that of another: the longer prefix comes first, and the chain of the shorter one has a hole there.

The shape depends only on the set of numbers. A chain's name states its numbers and how many levels are below it. So a new
or removed entry usually changes one leaf, and if only some chains of a new tree are written, a packet still finds every
number in no more levels. Masks are always prefixes: iptables-nft 1.8.7 stores other masks wrongly.
"""

import ipaddress
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from socket import AF_INET, AF_INET6, inet_pton
from typing import Literal, NamedTuple

import msgspec

from pykubeproxy.config import Dispatch
from pykubeproxy.objects import Key
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Entries, Rules, without
from pykubeproxy.rules.text import host, rule

# Most keys per leaf; most rules per key in a shared leaf.
LEAF = 16
# The maximum of levels below the root. nftables rejects more than 15 jumps: 13 remain with 7 around the tree, from
# PREROUTING to KUBE-MARK-MASQ. More than LEAF * 8**5 numbers, half a million, would make longer leaves.
LEVELS = 6
_STEP = 4  # bits


class Prefix(NamedTuple):
    """The first `length` bits of a number of `width` bits; the other bits are 0."""

    bits: int
    length: int
    width: int

    @property
    def last(self) -> int:
        """Return the greatest number with this prefix."""
        return self.bits | ((1 << (self.width - self.length)) - 1)


class Area(NamedTuple):
    """The numbers of a chain: those with a prefix, except those in holes; `levels` is how many levels are below it."""

    prefix: Prefix
    holes: tuple[Prefix, ...]
    levels: int

    @property
    def suffix(self) -> str:
        """Return what distinguishes this chain from others of its prefix; "" for a leaf without holes."""
        holes = "".join(f" -{hole.bits:x}/{hole.length}" for hole in sorted(self.holes))
        return holes + (f" {self.levels}" if self.levels else "")


class Tree(NamedTuple):
    """The rules of the root chain and all chains below it, each after those it jumps to."""

    root: Rules
    chains: tuple[tuple[str, Rules], ...]


class Branch(NamedTuple):
    """A chain below another one: its name, the rule that jumps to it, and a rule without effect that describes it.

    `note` is the last rule of the chain: packets that match another rule do not visit it.
    """

    name: str
    jump: str
    note: str


def build_tree(
    entries: Mapping[int, Rules],
    width: int,
    branch: Callable[[Area], Branch],
    leaf: int = 0,
    levels: int = LEVELS,
    elsewhere: Iterable[int] = (),
) -> Tree:
    """Arrange the rules of each number in a tree.

    `width` is the length of the numbers in bits, a multiple of four. `branch` returns the chain for an area. `leaf` is the
    maximum of numbers in a chain without branches, usually `LEAF`; `levels` is that of levels below the root. The rules
    of the numbers `elsewhere` are in another tree: chains have holes there.
    """
    builder = _Builder(entries, width, branch, leaf or LEAF)
    holes = tuple(Prefix(number, width, width) for number in elsewhere)
    root, _ = builder.rules(sorted(entries), holes, levels)
    return Tree(root, tuple(builder.chains))


class _TreePart(NamedTuple):
    prefix: Prefix
    numbers: Sequence[int]
    holes: tuple[Prefix, ...] = ()


class _Builder:
    def __init__(
        self, entries: Mapping[int, Rules], width: int, branch: Callable[[Area], Branch], leaf: int
    ) -> None:
        self.chains: list[tuple[str, Rules]] = []
        self._entries = entries
        self._width = width
        self._branch = branch
        self._leaf = leaf
        # A number with more rules has a chain of its own, so a leaf has at most as many rules for any `leaf`.
        self._most = max(LEAF * LEAF // leaf, 1)

    def rules(
        self, numbers: Sequence[int], holes: tuple[Prefix, ...], levels: int, by_digit: bool = False
    ) -> tuple[Rules, int]:
        """Return the rules for sorted numbers, and how many levels of chains they need; at most `levels`."""
        entries = self._entries
        is_leaf = len(numbers) <= self._leaf
        if (
            not levels
            or len(numbers) == 1
            or (is_leaf and all(len(entries[number]) <= self._most for number in numbers))
        ):
            return tuple(rule for number in numbers for rule in entries[number]), 0
        # Below a level by digits, digits need one level less each time.
        by_digit = by_digit or _digits(numbers, self._leaf) < levels
        if is_leaf:
            width = self._width
            parts: Iterator[_TreePart] = (
                _TreePart(Prefix(number, width, width), (number,)) for number in numbers
            )
        else:
            parts = (
                _by_digit(numbers, holes, self._width)
                if by_digit
                else _by_count(numbers, holes, self._width, self._leaf)
            )
        rules: list[str] = []
        needed = 0
        for part in parts:
            if len(part.numbers) == 1 and len(entries[part.numbers[0]]) <= self._most:
                # A branch costs as much as the entry itself.
                rules += entries[part.numbers[0]]
                continue
            below, levels_below = self.rules(part.numbers, part.holes, levels - 1, by_digit)
            child = self._branch(Area(part.prefix, part.holes, levels_below))
            self.chains.append((child.name, (*below, child.note)))
            rules.append(child.jump)
            needed = max(needed, levels_below + 1)
        return tuple(rules), needed


def _digits(numbers: Sequence[int], leaf: int) -> int:
    """Return how many levels by digits these sorted numbers need at most.

    A level divides more numbers than a leaf holds, so two of them that are so far apart differ first in its digit.
    """
    return len({((a ^ b).bit_length() - 1) // _STEP for a, b in zip(numbers, numbers[leaf:], strict=False)})


def _by_digit(numbers: Sequence[int], holes: tuple[Prefix, ...], width: int) -> Iterator[_TreePart]:
    """Divide sorted numbers by the first digit of four bits in which they differ."""
    length = _shared(numbers, width).length // _STEP * _STEP + _STEP
    shift = width - length
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] >> shift != numbers[start] >> shift:
            prefix = Prefix(numbers[start] >> shift << shift, length, width)
            yield _TreePart(prefix, numbers[start:end], _inside(prefix, holes))
            start = end


def _by_count(
    numbers: Sequence[int], holes: tuple[Prefix, ...], width: int, leaf: int
) -> Iterator[_TreePart]:
    """Divide sorted numbers into at most 17 parts of an eighth at most, rounded up to a power of two.

    From the leaves of the binary tree of all prefixes upwards, cut off each subtree with more than a sixteenth.
    """
    least = max(leaf, (1 << (len(numbers) - 1).bit_length()) // 8, 2) // 2
    parts: list[_TreePart] = []

    def cut(numbers: Sequence[int], enough: int = least) -> tuple[Sequence[int], tuple[Prefix, ...]]:
        """Return the numbers that no part has taken, and the prefixes of the parts."""
        left = numbers
        taken: tuple[Prefix, ...] = ()
        prefix = _shared(numbers, width)
        if len(numbers) > least:
            (low, taken_low), (high, taken_high) = map(cut, _halves(numbers))
            left, taken = [*low, *high], (*taken_low, *taken_high)
        if len(left) <= enough:
            return left, taken
        parts.append(_TreePart(prefix, left, (*taken, *_inside(prefix, holes))))
        return (), (prefix,)

    for half in _halves(numbers):
        cut(half, enough=0)
    return iter(parts)


def _shared(numbers: Sequence[int], width: int) -> Prefix:
    differing = (numbers[0] ^ numbers[-1]).bit_length()
    return Prefix(numbers[0] >> differing << differing, width - differing, width)


def _halves(numbers: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    differing = (numbers[0] ^ numbers[-1]).bit_length() - 1
    middle = bisect_left(numbers, numbers[-1] >> differing << differing)
    return numbers[:middle], numbers[middle:]


def _inside(prefix: Prefix, holes: tuple[Prefix, ...]) -> tuple[Prefix, ...]:
    return tuple(hole for hole in holes if prefix.bits <= hole.bits <= prefix.last)


_NODE_PORTS_COMMENT = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"

# Above this many addresses, or node ports, dispatch by tree. Also above this many rules: a Service may have thousands of
# ports at one address.
TREE_ABOVE = 200
_TREE_ABOVE_RULES = 1000
# An address with more rules has a tree by port, with up to so many ports in a leaf. A new chain costs iptables more than
# many rules, and only packets to this address visit them.
PORTS_LEAF = 256
# At most LEVELS together: of the tree of such addresses, their own chains, and the trees by port. With more than
# LEAF * 8**2 such addresses, a quarter of a million rules, leaves get longer.
_LEVELS_ABOVE, _LEVELS_BELOW = 2, 3

_PORT = re.compile(
    r'(?:-d \S+ )?-p (\w+) (?:-m comment --comment "[^"]*" )?(?:-m addrtype --dst-type LOCAL )?-m \w+ --dport (\d+)(?: |$)'
)
_ANY_ADDRESS = ""
# Names before and after those of all Services.
_FIRST, _LAST = Key("", ""), Key("~", "")


def shared_chain(
    key: ChainKey, ports: Iterable[Entries], node_port_jumps: Rules, dispatch: Dispatch = Dispatch.FLAT
) -> Tree:
    """Return the rules of one shared chain; `ports` are the entries of the service ports, sorted by name."""
    return (
        SharedEntries(key)
        .replacing({_FIRST: rules_by_chain(ports).get(key, ())})
        .arranged(node_port_jumps, dispatch)
    )


def rules_by_chain(ports: Iterable[Entries]) -> dict[ChainKey, Rules]:
    """Return the rules of service ports in each shared chain."""
    found: dict[ChainKey, list[Rules]] = {}
    for entries in ports:
        for key, rules in entries:
            found.setdefault(key, []).append(rules)
    # Most Services have one port.
    return {
        key: some[0] if len(some) == 1 else tuple([text for rules in some for text in rules])
        for key, some in found.items()
    }


class _AddressGroup(msgspec.Struct, frozen=True):
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

    Values share the groups in which they do not differ, so replacing some entries groups only those of their addresses
    again. A tree is arranged anew: that takes 50 ms of CPU time with 10,000 Services.
    """

    key: ChainKey
    services: Mapping[Key, Rules] = {}
    groups: Mapping[str, _AddressGroup] = {}

    def with_services(self, services: Mapping[Key, Rules]) -> "SharedEntries":
        """Return the entries with those of these Services instead of theirs, and without lost ones."""
        return self.replacing({_LAST: (), **services})

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
            **{address: _group(self.key, address, rules) for address, rules in changed.items() if rules},
        }
        for address in [address for address, rules in changed.items() if not rules]:
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


def _group(key: ChainKey, address: str, services: Mapping[Key, Rules]) -> _AddressGroup:
    """Group entries of one address. Arrange those without an address by port, and many of one address."""
    ordered = tuple((service, services[service]) for service in sorted(services))
    rules = _ordered(key, (rules for _, rules in ordered))
    if address == _ANY_ADDRESS:
        by_port = _by_port(rules)
        tree = _port_tree(key, address, by_port)
        return _AddressGroup(ordered, rules, tree, 0, sum(map(len, by_port.values())))
    # ipaddress takes ten times as long.
    packed = inet_pton(AF_INET6 if ":" in address else AF_INET, address.partition("/")[0])
    tree, at, width = Tree(rules, ()), int.from_bytes(packed, "big"), 8 * len(packed)
    if len(rules) > PORTS_LEAF:
        ports = _port_tree(key, address, _by_port(rules), PORTS_LEAF, _LEVELS_BELOW)
        whole = Prefix(at, width, width)
        own = _address_branch(key, "ports")(Area(whole, (), 0))
        tree = Tree((own.jump,), (*ports.chains, (own.name, (*ports.root, own.note))))
    return _AddressGroup(ordered, rules, tree, at, 1)


def _ordered(key: ChainKey, rules: Iterable[Rules]) -> Rules:
    """Return the rules of Services, in order of their names, in the order of a flat chain."""
    found = [text for some in rules for text in some]
    if key == skeleton.NAT_SERVICES:
        # Cluster IPs go first: no Service may hijack one as its external IP (CVE-2020-8554).
        found.sort(key=_is_no_cluster_ip)
    return tuple(found)


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


def _jump(match: str = "", destination: str = "") -> str:
    return rule(match, destination=destination, comment=_NODE_PORTS_COMMENT, target=names.NODEPORTS)
