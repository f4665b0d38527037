"""Remove all chains and jumps of a service proxy, and nothing else."""

from collections.abc import Collection, Iterable

import msgspec

from pykubeproxy.rules import skeleton
from pykubeproxy.rules.iptables_save import parse_rule, parse_target
from pykubeproxy.rules.ownership import is_ours, referenced_by_others
from pykubeproxy.rules.ruleset import KUBELET_HINTS, ChainKey, Ruleset, without
from pykubeproxy.rules.text import block, delete_chains, empty_chains, join

# A jump to a proxy chain is ours if it has one of our comments; its matches differ by version.
_OUR_COMMENTS = frozenset(
    comment for rules in skeleton.JUMPS.values() for rule in rules if (comment := parse_rule(rule).comment)
)
_INPUT = ChainKey("filter", "INPUT")


class Removal(msgspec.Struct, frozen=True):
    """What to remove from the tables of one family.

    - `jumps`: rules in built-in chains that jump to ours
    - `deleted`: our chains
    - `kept`: our chains that foreign rules jump to, so they can only be emptied
    - `emptied`: those of `kept` that hold rules
    - `guard_stays`: the proxy's KUBE-FIREWALL stays, because nothing else protects 127.0.0.0/8 (CVE-2020-8558)
    """

    jumps: tuple[tuple[ChainKey, str], ...] = ()
    deleted: tuple[ChainKey, ...] = ()
    kept: tuple[ChainKey, ...] = ()
    emptied: tuple[ChainKey, ...] = ()
    guard_stays: bool = False

    def restore_input(self, chains_per_block: int | None) -> str:
        """Return the input for iptables-restore --noflush; empty if there is nothing to remove.

        At most `chains_per_block` chains go into a block. Table filter goes last: it rejects traffic to services without
        endpoints until nat is empty.
        """
        return "".join(
            text for table in ("mangle", "nat", "filter") for text in _blocks(self, table, chains_per_block)
        )


def removal(live: Ruleset, *, loopback_guarded: bool = False, all_modes: bool = False) -> Removal:
    """Return the chains and jumps of a service proxy in live tables, of any version.

    - `loopback_guarded`: other rules drop packets to 127.0.0.0/8, or none arrive: the proxy's KUBE-FIREWALL may go
    - `all_modes`: include what only kube-proxy's ipvs mode writes
    """
    ours = {key for key in live.chains if is_ours(key) or (all_modes and key in skeleton.IPVS_CHAINS)}
    if firewall_goes := _is_proxys_firewall(live, loopback_guarded):
        ours.add(skeleton.KUBELET_FIREWALL)
    comments = _OUR_COMMENTS | skeleton.IPVS_COMMENTS if all_modes else _OUR_COMMENTS
    jumps: list[tuple[ChainKey, str]] = []
    others = {key: rules for key, rules in live.chains.items() if key not in ours}
    for key in live.chains:
        if key in skeleton.JUMPS:
            own = [rule for rule in live.chains[key] if _is_our_jump(key.table, rule, ours, comments)]
            jumps += ((key, rule) for rule in own)
            others[key] = without(live.chains[key], own)
    referenced = referenced_by_others(Ruleset(live.family, others))
    return Removal(
        jumps=tuple(jumps),
        deleted=tuple(key for key in live.chains if key in ours and key not in referenced),
        kept=tuple(key for key in live.chains if key in ours and key in referenced),
        emptied=tuple(key for key in live.chains if key in ours and key in referenced and live.chains[key]),
        guard_stays=skeleton.KUBELET_FIREWALL in live.chains and not firewall_goes and not has_kubelet(live),
    )


def has_kubelet(live: Ruleset) -> bool:
    """Return whether the kubelet writes to these tables."""
    return any(hint in live.chains for hint in KUBELET_HINTS)


def kubelet_guards_loopback(live: Ruleset) -> bool:
    """Return whether a rule of the kubelet drops packets of other hosts to 127.0.0.0/8."""
    return (
        has_kubelet(live)
        and skeleton.LOOPBACK_GUARD in live.chains.get(skeleton.KUBELET_FIREWALL, ())
        and skeleton.KUBELET_FIREWALL_JUMP in live.chains.get(_INPUT, ())
    )


def is_of_ipvs_mode(rule: str) -> bool:
    """Return whether only kube-proxy's ipvs mode writes this jump into a built-in chain."""
    return parse_rule(rule).comment in skeleton.IPVS_COMMENTS


def _is_proxys_firewall(live: Ruleset, loopback_guarded: bool) -> bool:
    """Return whether a proxy made KUBE-FIREWALL and nobody needs it any more.

    The kubelet and the proxies write the same chain, but the kubelet's is never empty and comes with a hint chain.
    """
    rules = live.chains.get(skeleton.KUBELET_FIREWALL)
    if rules is None or _has_foreign_jump(live, skeleton.KUBELET_FIREWALL):
        return False
    return not rules or (
        loopback_guarded and not has_kubelet(live) and set(rules) == {skeleton.LOOPBACK_GUARD}
    )


def _has_foreign_jump(live: Ruleset, target: ChainKey) -> bool:
    return any(
        parse_target(rule) == target.chain
        for key, rules in live.chains.items()
        if key.table == target.table
        for rule in rules
        if target.chain in rule and not (key in skeleton.JUMPS and rule in skeleton.JUMPS[key])
    )


def _is_our_jump(table: str, rule: str, ours: Collection[ChainKey], comments: Collection[str]) -> bool:
    parsed = parse_rule(rule)
    return ChainKey(table, parsed.target) in ours and (
        parsed.comment in comments or rule == skeleton.KUBELET_FIREWALL_JUMP
    )


def _blocks(removal: Removal, table: str, chains_per_block: int | None) -> Iterable[str]:
    """Yield the blocks of one table: jumps first, then empty all chains, then delete them; chains may refer to others."""
    jumps = join(f"-D {key.chain} {rule}" for key, rule in removal.jumps if key.table == table)
    deleted = [key.chain for key in removal.deleted if key.table == table]
    emptied = [*(key.chain for key in removal.emptied if key.table == table), *deleted]
    if chains_per_block is None or len(emptied) <= chains_per_block:
        yield block(table, empty_chains(emptied), jumps, delete_chains(deleted))
        return
    yield block(table, jumps)
    for write, chains in ((empty_chains, emptied), (delete_chains, deleted)):
        for start in range(0, len(chains), chains_per_block):
            yield block(table, write(chains[start : start + chains_per_block]))
