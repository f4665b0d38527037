"""Answer which live chains and rules are ours, and which addresses and chains live rules of any proxy serve."""

import re
from collections.abc import Collection, Iterator, Mapping

from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.iptables_save import parse_rule, parse_target
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Rules, Ruleset
from pykubeproxy.rules.text import block, join
from pykubeproxy.services.ports import ApiServers

# An entry for a UDP service port: with -d for an address, without for a node port.
_UDP_ENTRY = re.compile(r"(?:-d (\S+)/(?:32|128) )?-p udp .*--dport (\d+) -j KUBE-(?:SVC|SVL|EXT|FW)-")
_FIXED = frozenset((*skeleton.SHARED, *skeleton.FIXED))
# In table filter, only chains of dispatch trees.
_OWNED_TABLES = ("nat", "filter")
# The foreign chains that hold rules of ours: built-in ones and KUBE-FIREWALL.
FOREIGN_CHAINS = frozenset((*skeleton.JUMPS, skeleton.KUBELET_FIREWALL))


def is_ours(key: ChainKey) -> bool:
    """Return whether a chain belongs to the proxy alone; KUBE-FIREWALL is shared with the kubelet."""
    return key in _FIXED or is_owned(key)


def is_owned(key: ChainKey) -> bool:
    """Return whether a chain belongs to a single service or endpoint, of any proxy, or to a dispatch tree."""
    return key.table in _OWNED_TABLES and names.is_owned(key.chain)


def referenced_by_others(live: Ruleset) -> frozenset[ChainKey]:
    """Return the chains that cannot be deleted because a rule in a foreign chain jumps to them.

    Built-in chains are foreign, so the targets of our jumps in them are included.
    """
    return frozenset(
        ChainKey(key.table, parse_target(rule))
        for key, rules in live.chains.items()
        if not is_ours(key)
        for rule in rules
        if "KUBE-" in rule
    )


def ensured_lines(
    live: Ruleset, options: RuleOptions, chains: Collection[ChainKey] = FOREIGN_CHAINS
) -> dict[str, tuple[str, ...]]:
    """Return the lines that add our missing rules to these chains, by table."""
    lines: dict[str, tuple[str, ...]] = {}
    for key in (skeleton.KUBELET_FIREWALL, *skeleton.JUMPS):
        if key in chains and (missing := tuple(_missing_lines(live, key, options))):
            lines[key.table] = (*lines.get(key.table, ()), *missing)
    return lines


def missing_jumps(live: Ruleset, chains: Collection[ChainKey]) -> dict[str, int]:
    """Return how many of our jumps are missing in these chains, by table."""
    missing: dict[str, int] = {}
    for key, jumps in skeleton.JUMPS.items():
        present = live.chains.get(key, ())
        if key in chains and (count := sum(jump not in present for jump in jumps)):
            missing[key.table] = missing.get(key.table, 0) + count
    return missing


def _missing_lines(live: Ruleset, key: ChainKey, options: RuleOptions) -> Iterator[str]:
    """Yield the lines for one chain.

    If a jump is missing, delete all our jumps and insert them again on top, in their order. The order of foreign rules
    stays.
    """
    present = live.chains.get(key)
    if key == skeleton.KUBELET_FIREWALL:
        if present is None:
            yield f"-N {names.KUBELET_FIREWALL}"
        yield from (
            f"-A {key.chain} {rule}"
            for rule in skeleton.kubelet_firewall(options)
            if rule not in (present or ())
        )
        return
    jumps = skeleton.JUMPS[key]
    if any(jump not in (present or ()) for jump in jumps):
        yield from (f"-D {key.chain} {rule}" for rule in present or () if rule in jumps)
        yield from (f"-I {key.chain} {jump}" for jump in reversed(jumps))


# The chains of table filter above rules for external addresses, and the ends of comments of such rules in table nat.
_FILTER = (skeleton.FILTER_EXTERNAL, skeleton.FILTER_FIREWALL)
_COMMENTS = (" external IP", " loadbalancer IP")


def release_input(live: Ruleset, servers: ApiServers) -> str:
    """Return the restore input that deletes these rules, except those of cluster IPs; "" if there are none."""
    external = {chain for key in _FILTER for chain in with_branches(live, key)}
    found = [
        (key, rule)
        for key, rules in live.chains.items()
        if is_ours(key)
        for rule in rules
        if "--dport" in rule and _is_external(key, rule, servers, external)
    ]
    return "".join(
        block(table, join(f"-D {key.chain} {rule}" for key, rule in found if key.table == table))
        for table in ("nat", "filter")
    )


def _is_external(key: ChainKey, text: str, servers: ApiServers, external: Collection[ChainKey]) -> bool:
    rule = parse_rule(text)
    if rule.protocol != "TCP" or (rule.destination, rule.port) not in servers:
        return False
    return rule.comment.endswith(_COMMENTS) if key.table == "nat" else key in external


def with_branches(live: Ruleset, key: ChainKey) -> Mapping[ChainKey, Rules]:
    """Return a live shared chain of table filter and all branches below it, with their rules except jumps to branches."""
    found: dict[ChainKey, Rules] = {}
    waiting = [key]
    while waiting:
        chain = waiting.pop()
        targets = {text: parse_target(text) for text in live.chains.get(chain, ())}
        found[chain] = tuple(text for text, target in targets.items() if not names.is_owned(target))
        below = (ChainKey(key.table, target) for target in targets.values() if names.is_owned(target))
        waiting += (chain for chain in dict.fromkeys(below) if chain not in found)
    return found


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
