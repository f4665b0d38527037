"""Chains of iptables-nft as the kernel has them: whether there is one, and which of them hold a word.

What rules say is left to iptables; this only finds out which are worth the time of asking it. Works on the network
namespace of the calling thread.
"""

import errno
import re
from collections.abc import Iterator
from typing import NamedTuple

from pykubeproxy.kernel import netfilter
from pykubeproxy.kernel.domain import DOMAIN
from pykubeproxy.objects import Family

# linux/netfilter/nf_tables.h
_GET_CHAIN, _GET_RULE = 10 << 8 | 4, 10 << 8 | 7
_CHAIN_TABLE, _CHAIN_NAME, _RULE_TABLE, _RULE_CHAIN = 1, 3, 1, 2
# A verdict to jump or go to a chain (NFT_JUMP, NFT_GOTO): its code, the header of the chain's name, the name.
_JUMP = re.compile(rb"\xff\xff\xff[\xfd\xfc]..\x02\x00([\x21-\x7e]+)\0", re.DOTALL)
_COMMENT = b"\x01\x00comment\x00"


def has_chain(family: Family, table: str, chain: str) -> bool:
    """Whether a table has a chain. Raises OSError if the kernel has no nftables, or without CAP_NET_ADMIN."""
    wanted = netfilter.attribute(_CHAIN_TABLE, _text(table)) + netfilter.attribute(_CHAIN_NAME, _text(chain))
    try:
        netfilter.ask(_GET_CHAIN, 0, DOMAIN[family], wanted)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


class Ways(NamedTuple):
    """The chains that hold a word, with those on the way to them.

    `all_told`: every rule on these ways that ends them has a comment, so that there is nothing without words.
    """

    chains: set[str]
    all_told: bool


def ways_to(family: Family, table: str, root: str, word: re.Pattern[bytes]) -> Ways:
    """The chains with rules of iptables that hold a word, as comments may, and those on the way to them from the root.

    Only jumps without a comment are followed: rules that have one say what they are for. What changes meanwhile may be
    missed. Raises OSError as `has_chain` does.
    """
    found: set[str] = set()
    done: set[str] = set()
    untold = False

    def visit(chain: str) -> bool:
        nonlocal untold
        done.add(chain)
        rules = [*_rules(family, table, chain)]
        holds = any(word.search(rule.raw) for rule in rules)
        untold = untold or any(not rule.jump and _COMMENT not in rule.raw for rule in rules)
        for rule in rules:
            if rule.jump and rule.jump not in done and _COMMENT not in rule.raw:
                holds = visit(rule.jump) or holds
        if holds:
            found.add(chain)
        return holds

    visit(root)
    return Ways(found, not untold)


def words_below(family: Family, table: str, root: str, word: re.Pattern[bytes]) -> set[str]:
    """What a pattern finds in the rules of a chain and of those that its jumps without a comment lead to.

    Raises OSError as `has_chain` does.
    """
    found: set[str] = set()
    waiting, done = [root], {root}
    while waiting:
        for rule in _rules(family, table, waiting.pop()):
            found |= {match.decode() for match in word.findall(rule.raw)}
            if rule.jump and rule.jump not in done and _COMMENT not in rule.raw:
                done.add(rule.jump)
                waiting.append(rule.jump)
    return found


class _Rule(NamedTuple):
    raw: bytes
    jump: str


def _rules(family: Family, table: str, chain: str) -> Iterator[_Rule]:
    """The rules of one chain as the kernel has them; none if there is no such chain."""
    wanted = netfilter.attribute(_RULE_TABLE, _text(table)) + netfilter.attribute(_RULE_CHAIN, _text(chain))
    try:
        for raw in netfilter.dump(_GET_RULE, DOMAIN[family], wanted):
            match = _JUMP.search(raw)
            yield _Rule(raw, match[1].decode() if match else "")
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise


def _text(name: str) -> bytes:
    return name.encode() + b"\0"
