"""Remove all chains and jumps of a service proxy, and nothing else."""

from collections.abc import Iterable

import msgspec

from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ownership import is_ours, referenced_by_others
from pykubeproxy.rules.parse import parse_rule
from pykubeproxy.rules.restore_text import block, delete_chains, empty_chains, join
from pykubeproxy.rules.ruleset import ChainKey, Ruleset, without

# A jump to a proxy chain is ours if it has one of our comments; its matches differ by version.
_OUR_COMMENTS = frozenset(
    comment for rules in skeleton.JUMPS.values() for rule in rules if (comment := parse_rule(rule).comment)
)


class Removal(msgspec.Struct, frozen=True):
    """What to remove from the tables of one family.

    - `jumps`: rules in built-in chains that jump to ours
    - `deleted`: our chains
    - `kept`: our chains that foreign rules jump to, so they can only be emptied
    - `emptied`: those of `kept` that hold rules
    """

    jumps: tuple[tuple[ChainKey, str], ...] = ()
    deleted: tuple[ChainKey, ...] = ()
    kept: tuple[ChainKey, ...] = ()
    emptied: tuple[ChainKey, ...] = ()

    def is_empty(self) -> bool:
        """Return whether there is nothing to remove."""
        return not (self.jumps or self.deleted or self.emptied)

    def restore_input(self, chains_per_block: int | None) -> str:
        """Return the input for iptables-restore --noflush; empty if there is nothing to remove.

        At most `chains_per_block` chains go into a block. Table filter goes last: it rejects traffic to services without
        endpoints until nat is empty.
        """
        return "".join(
            text for table in ("mangle", "nat", "filter") for text in _blocks(self, table, chains_per_block)
        )


def removal(live: Ruleset) -> Removal:
    """Return the chains and jumps of a service proxy in live tables, of any version.

    KUBE-FIREWALL belongs to the kubelet and stays, with the jumps to it and the rule in it that protects 127.0.0.0/8:
    the sysctl route_localnet stays set too (CVE-2020-8558).
    """
    jumps: list[tuple[ChainKey, str]] = []
    others = dict(live.chains)
    for key in live.chains:
        if key in skeleton.JUMPS:
            own = [rule for rule in live.chains[key] if _is_our_jump(key.table, rule)]
            jumps += ((key, rule) for rule in own)
            others[key] = without(live.chains[key], own)
    ours = tuple(key for key in live.chains if is_ours(key))
    referenced = referenced_by_others(Ruleset(live.family, others))
    return Removal(
        jumps=tuple(jumps),
        deleted=tuple(key for key in ours if key not in referenced),
        kept=tuple(key for key in ours if key in referenced),
        emptied=tuple(key for key in ours if key in referenced and live.chains[key]),
    )


def _is_our_jump(table: str, rule: str) -> bool:
    parsed = parse_rule(rule)
    return parsed.comment in _OUR_COMMENTS and is_ours(ChainKey(table, parsed.target))


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
