"""Tables read chain by chain, for those who need few chains of many. Nothing is written, and nothing is kept for long.

iptables-nft prints a single chain within milliseconds, and a large table as a whole within seconds. Works on the
network namespace of the calling thread.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from pykubeproxy.kernel import chains as kernel_chains
from pykubeproxy.kernel.errors import KernelError, NotPermitted
from pykubeproxy.kernel.iptables import Iptables
from pykubeproxy.kernel.tools import Backend
from pykubeproxy.rules.ruleset import ChainKey, Count, Counters, Ruleset

# From so many single chains on it is faster to read everything.
_MOST_CHAINS = 100
_POLICY = re.compile(r"-P \S+ (\S+)")
# A rule with its counts; what looks like them before that is part of a comment.
_COUNTED = re.compile(r"-A \S+(?: (.*))? -c (\d+) (\d+)(.*)")
_TARGET = re.compile(r".*-[jg] (\S+)")

_T = TypeVar("_T")


def live(iptables: Iptables) -> tuple[Ruleset, Counters]:
    """The tables as they are when a chain is first asked for; on legacy, which reads all at once anyway, as of now.

    Looking a chain up raises what `Iptables.save` raises.
    """
    if iptables.backend is Backend.LEGACY:
        return iptables.save_counted()
    chains = _Chains(iptables)
    ruleset = Ruleset(
        iptables.family,
        _View(chains, lambda chain: chain.rules),
        _View(chains, lambda chain: chain.policy),
    )
    return ruleset, _View(chains, lambda chain: chain.counts)


def part_about(
    iptables: Iptables, name: str, roots: Iterable[ChainKey], others: Iterable[ChainKey]
) -> tuple[Ruleset, Counters] | None:
    """The part of large tables that is about a name: what rules that hold it, in chains below the roots, lead to.

    The chains on the way from the roots are there whole, and `others` too; chains that only their other rules lead to
    are not. Empty where no rule holds the word, though all rules there say whom they are for; None where not all do, and
    on legacy, which cannot read a part.
    """
    if iptables.backend is Backend.LEGACY:
        return None
    # It ends where nothing follows that names are made of.
    word = re.escape(name) + "(?![A-Za-z0-9.-])"
    looked = {root: _ways(iptables, root, re.compile(word.encode())) for root in roots}
    ways = {root: {ChainKey(root.table, it) for it in looked[root].chains} for root in looked}
    if not any(ways.values()):
        all_told = all(it.all_told for it in looked.values())
        return (Ruleset(iptables.family, {}), {}) if all_told else None
    ruleset, counters = live(iptables)
    shared = {*ways, *others}.union(*ways.values())
    chains = {key: ruleset.chains[key] for key in shared if key in ruleset.chains}
    waiting = [
        ChainKey(key.table, _target(rule))
        for way in ways.values()
        for key in way
        for rule in chains.get(key, ())
        if re.search(word, rule)
    ]
    while waiting:
        key = waiting.pop()
        if key not in chains and key in ruleset.chains:
            chains[key] = ruleset.chains[key]
            waiting += (ChainKey(key.table, _target(rule)) for rule in chains[key])
    return Ruleset(ruleset.family, chains), {key: counters[key] for key in chains}


def _ways(iptables: Iptables, root: ChainKey, word: re.Pattern[bytes]) -> kernel_chains.Ways:
    """The chains with rules that hold the word, and those on the way there from the root."""
    try:
        return kernel_chains.ways_to(iptables.family, root.table, root.chain, word)
    except OSError as error:
        raise _not_asked(error) from error


def _target(rule: str) -> str:
    match = _TARGET.match(rule)
    return match[1] if match else ""


def _not_asked(error: OSError) -> KernelError:
    if isinstance(error, PermissionError):
        return NotPermitted("asking the kernel for its chains", error.strerror or str(error))
    return KernelError(f"the kernel cannot be asked for its chains: {error.strerror or error}")


class _Chain(NamedTuple):
    rules: tuple[str, ...] = ()
    counts: tuple[Count, ...] = ()
    policy: str = "ACCEPT"


class _Chains:
    """Chains by their keys, read one by one at first, all together once that would take longer."""

    def __init__(self, iptables: Iptables) -> None:
        self._iptables = iptables
        self._known: dict[ChainKey, _Chain | None] = {}
        self._there: dict[ChainKey, bool] = {}
        self._read = 0
        self._whole: tuple[Ruleset, Counters] | None = None

    def has(self, key: ChainKey) -> bool:
        """Whether there is such a chain."""
        if self._whole:
            return key in self._whole[0].chains
        if key not in self._there:
            try:
                self._there[key] = kernel_chains.has_chain(self._iptables.family, *key)
            except OSError as error:
                raise _not_asked(error) from error
        return self._there[key]

    def get(self, key: ChainKey) -> _Chain | None:
        """A chain; None if there is none."""
        if key not in self._known:
            self._known[key] = self._fetch(key) if self.has(key) else None
        return self._known[key]

    def whole(self) -> tuple[Ruleset, Counters]:
        """Everything there is."""
        if self._whole is None:
            self._whole = self._iptables.save_counted()
        return self._whole

    def _fetch(self, key: ChainKey) -> _Chain | None:
        self._read += 1
        if self._read <= _MOST_CHAINS:
            return _parsed(self._iptables.chain(key))
        ruleset, counters = self.whole()
        if key not in ruleset.chains:
            return None
        policy = ruleset.policies.get(key, "ACCEPT")
        return _Chain(ruleset.chains[key], counters.get(key, ()), policy)


class _View(Mapping[ChainKey, _T]):
    """One side of the chains: rules, counts or policies."""

    def __init__(self, chains: _Chains, side: Callable[[_Chain], _T]) -> None:
        self._chains = chains
        self._side = side

    def __getitem__(self, key: ChainKey) -> _T:
        chain = self._chains.get(key)
        if chain is None:
            raise KeyError(key)
        return self._side(chain)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, ChainKey) and self._chains.has(key)

    def __iter__(self) -> Iterator[ChainKey]:
        return iter(self._chains.whole()[0].chains)

    def __len__(self) -> int:
        return len(self._chains.whole()[0].chains)


def _parsed(text: str) -> _Chain:
    """What `iptables -v -S CHAIN` printed."""
    rules, counts, policy = [], [], "ACCEPT"
    for line in text.splitlines():
        if match := _COUNTED.fullmatch(line):
            rules.append(f"{match[1] or ''}{match[4]}".strip())
            counts.append(Count(int(match[2]), int(match[3])))
        elif match := _POLICY.match(line):
            policy = match[1]
    return _Chain(tuple(rules), tuple(counts), policy)
