"""Taking out all that a proxy has programmed, and nothing else."""

import re
from collections.abc import Iterable

import msgspec

from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ownership import is_ours, referred_to_by_others
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# A jump to a chain of ours is ours if it bears a comment of ours: what it matches on differs by version.
_COMMENT = re.compile(r'--comment "([^"]*)"')
_TARGET = re.compile(r" -j (\S+)$")
_OUR_COMMENTS = frozenset(
    match[1] for rules in skeleton.JUMPS.values() for rule in rules if (match := _COMMENT.search(rule))
)


class Removal(msgspec.Struct, frozen=True):
    """What is to be taken out of the tables of one family.

    - `jumps`: rules in the kernel's own chains that lead to ours
    - `deleted`: chains of ours
    - `kept`: chains of ours that rules of others jump to, so that they can only be emptied
    - `emptied`: those of them that hold rules
    """

    jumps: tuple[tuple[ChainKey, str], ...] = ()
    deleted: tuple[ChainKey, ...] = ()
    kept: tuple[ChainKey, ...] = ()
    emptied: tuple[ChainKey, ...] = ()

    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.jumps or self.deleted or self.emptied)

    def restore_input(self, chains_per_block: int | None) -> str:
        """The input for one call of iptables-restore --noflush; empty if there is nothing to do.

        `chains_per_block` is as in `plan.restore_input`. Table filter goes last: until nat is clear, it goes on
        refusing what has no endpoints.
        """
        return "".join(
            block for table in ("mangle", "nat", "filter") for block in _blocks(self, table, chains_per_block)
        )


def removal(live: Ruleset) -> Removal:
    """What of `live` is a proxy's, whichever version wrote it.

    KUBE-FIREWALL is the kubelet's and stays, with the jumps to it. So does the rule in it that keeps neighbours off
    127.0.0.0/8: the setting route_localnet, which it makes up for, stays as well (CVE-2020-8558).
    """
    jumps = tuple(
        (key, rule)
        for key, rules in live.chains.items()
        if key in skeleton.JUMPS
        for rule in rules
        if _is_our_jump(key.table, rule)
    )
    others = {key: rules for key, rules in live.chains.items() if key not in skeleton.JUMPS}
    for key in skeleton.JUMPS:
        others[key] = tuple(rule for rule in live.chains.get(key, ()) if (key, rule) not in jumps)
    ours = tuple(key for key in live.chains if is_ours(key))
    held = referred_to_by_others(Ruleset(live.family, others))
    return Removal(
        jumps=jumps,
        deleted=tuple(key for key in ours if key not in held),
        kept=tuple(key for key in ours if key in held),
        emptied=tuple(key for key in ours if key in held and live.chains[key]),
    )


def _is_our_jump(table: str, rule: str) -> bool:
    comment, target = _COMMENT.search(rule), _TARGET.search(rule)
    return bool(comment and target and comment[1] in _OUR_COMMENTS and is_ours(ChainKey(table, target[1])))


def _blocks(what: Removal, table: str, chains_per_block: int | None) -> Iterable[str]:
    """One table's blocks. Jumps go first, and no chain before all are empty: they may refer to one another."""
    jumps = [f"-D {key.chain} {rule}" for key, rule in what.jumps if key.table == table]
    emptied = [f":{key.chain} - [0:0]" for key in (*what.emptied, *what.deleted) if key.table == table]
    deleted = [f"-X {key.chain}" for key in what.deleted if key.table == table]
    if chains_per_block is None or len(emptied) <= chains_per_block:
        yield _block(table, [*emptied, *jumps, *deleted])
        return
    yield _block(table, jumps)
    for lines in (emptied, deleted):
        for start in range(0, len(lines), chains_per_block):
            yield _block(table, lines[start : start + chains_per_block])


def _block(table: str, lines: list[str]) -> str:
    return "\n".join((f"*{table}", *lines, "COMMIT", "")) if lines else ""
