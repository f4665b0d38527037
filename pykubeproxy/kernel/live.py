"""Read live tables chain by chain, for callers that need few chains of many.

iptables-nft prints one chain in milliseconds, but a large table in seconds. Works on the network namespace of the
calling thread.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from pykubeproxy.kernel import nftables
from pykubeproxy.kernel.errors import KernelError, NotPermitted
from pykubeproxy.kernel.iptables import Backend, Iptables
from pykubeproxy.rules.ruleset import ChainKey, Count, Counters, Ruleset

# Above this many single chains, reading everything is faster.
_MOST_CHAINS = 100
_POLICY = re.compile(r"-P \S+ (\S+)")
# A rule with its counters: the last match, since a comment may contain the same text.
_COUNTED = re.compile(r"-A \S+(?: (.*))? -c (\d+) (\d+)(.*)")
_TARGET = re.compile(r".*-[jg] (\S+)")

_T = TypeVar("_T")


def live_ruleset(iptables: Iptables) -> tuple[Ruleset, Counters]:
    """Return the live rules and counters. On nft, each chain is read at its first lookup, which raises as `save` does."""
    if iptables.backend is Backend.LEGACY:
        return iptables.save_counted()
    chains = _ChainReader(iptables)
    ruleset = Ruleset(
        iptables.family,
        _View(chains, lambda chain: chain.rules),
        _View(chains, lambda chain: chain.policy),
    )
    return ruleset, _View(chains, lambda chain: chain.counts)


def live_ruleset_about(
    iptables: Iptables, name: str, roots: Iterable[ChainKey], others: Iterable[ChainKey]
) -> tuple[Ruleset, Counters] | None:
    """Return the live rules and counters about a name: the rules below the roots that mention it, and their targets.

    Chains on the path from the roots, and `others`, are complete. Leaves out chains that only their other rules jump to.
    Returns empty results if no rule mentions the name. Returns None on legacy, and if no rule mentions the name but some
    have no comment.
    """
    if iptables.backend is Backend.LEGACY:
        return None
    # The name, not as the beginning of a longer one.
    pattern = re.escape(name) + "(?![A-Za-z0-9.-])"
    paths: set[ChainKey] = set()
    shared, all_commented = {*others}, True
    for root in roots:
        with _kernel_errors():
            mentions = nftables.chains_mentioning(iptables.family, *root, re.compile(pattern.encode()))
        paths.update(ChainKey(root.table, chain) for chain in mentions.chains)
        shared.add(root)
        all_commented = all_commented and mentions.all_commented
    if not paths:
        return (Ruleset(iptables.family, {}), {}) if all_commented else None
    ruleset, counters = live_ruleset(iptables)
    chains = {key: ruleset.chains[key] for key in shared | paths if key in ruleset.chains}
    pending = [
        ChainKey(key.table, _target(rule))
        for key in paths
        for rule in chains.get(key, ())
        if re.search(pattern, rule)
    ]
    while pending:
        key = pending.pop()
        if key not in chains and key in ruleset.chains:
            chains[key] = ruleset.chains[key]
            pending += (ChainKey(key.table, _target(rule)) for rule in chains[key])
    return Ruleset(ruleset.family, chains), {key: counters[key] for key in chains}


def _target(rule: str) -> str:
    match = _TARGET.match(rule)
    return match[1] if match else ""


@contextlib.contextmanager
def _kernel_errors() -> Iterator[None]:
    """Turn an OSError of netlink into a KernelError."""
    what = "cannot read the chains of nf_tables"
    try:
        yield
    except PermissionError as error:
        raise NotPermitted(what, error.strerror or "") from error
    except OSError as error:
        raise KernelError(f"{what}: {error.strerror or error}") from error


class _LiveChain(NamedTuple):
    rules: tuple[str, ...] = ()
    counts: tuple[Count, ...] = ()
    policy: str = "ACCEPT"


class _ChainReader:
    """Read chains by key: one by one at first, and all together once that is faster."""

    def __init__(self, iptables: Iptables) -> None:
        self._iptables = iptables
        self._read = 0
        self._whole: tuple[Ruleset, Counters] | None = None
        self.get = functools.cache(self._get)

    def whole(self) -> tuple[Ruleset, Counters]:
        """Return all chains, read once."""
        if self._whole is None:
            self._whole = self._iptables.save_counted()
        return self._whole

    def _get(self, key: ChainKey) -> _LiveChain | None:
        if self._whole is None:
            with _kernel_errors():
                exists = nftables.has_chain(self._iptables.family, *key)
            if not exists:
                return None
            self._read += 1
            if self._read <= _MOST_CHAINS:
                return _parsed(self._iptables.chain(key))
        ruleset, counters = self.whole()
        if key not in ruleset.chains:
            return None
        return _LiveChain(ruleset.chains[key], counters.get(key, ()), ruleset.policies.get(key, "ACCEPT"))


class _View(Mapping[ChainKey, _T]):
    """The rules, counters or policies of the chains, by key."""

    def __init__(self, chains: _ChainReader, field: Callable[[_LiveChain], _T]) -> None:
        self._chains = chains
        self._field = field

    def __getitem__(self, key: ChainKey) -> _T:
        chain = self._chains.get(key)
        if chain is None:
            raise KeyError(key)
        return self._field(chain)

    def __iter__(self) -> Iterator[ChainKey]:
        return iter(self._chains.whole()[0].chains)

    def __len__(self) -> int:
        return len(self._chains.whole()[0].chains)


def _parsed(text: str) -> _LiveChain:
    """Parse the output of `iptables -v -S CHAIN`."""
    rules, counts, policy = [], [], "ACCEPT"
    for line in text.splitlines():
        if match := _COUNTED.fullmatch(line):
            rules.append(f"{match[1] or ''}{match[4]}".strip())
            counts.append(Count(int(match[2]), int(match[3])))
        elif match := _POLICY.match(line):
            policy = match[1]
    return _LiveChain(tuple(rules), tuple(counts), policy)
