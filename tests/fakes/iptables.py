"""A fake iptables that applies restore input to tables in memory.

It expects rules in iptables-save format and does not normalize others. tests/kernel runs the same tests on it and on
real iptables.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise

from pykubeproxy.kernel import Backend, Failed, KernelError, Rejected
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import canonical
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.skeleton import NFACCT_NAMES

BUILT_IN = {
    "raw": ("PREROUTING", "OUTPUT"),
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "security": ("INPUT", "FORWARD", "OUTPUT"),
}
TARGETS = {"ACCEPT", "DROP", "RETURN", "REJECT", "DNAT", "SNAT", "MASQUERADE", "MARK", "LOG", "REDIRECT"}
MATCHES = {
    *("comment", "conntrack", "addrtype", "mark", "statistic", "recent", "nfacct", "tcp", "udp", "sctp"),
    *("limit", "multiport", "physdev", "iprange", "set"),
}
_COMMAND = re.compile(r"(?:\[\d+:\d+\] )?-([ADFINX])(?: (\S+))?(?: (.+))?$")
_CHAIN = re.compile(r":(\S+) (\S+)(?: \[\d+:\d+\])?$")
# NFT_JUMP_STACK_SIZE, less the built-in chain.
_NFT_JUMPS = 15
_COMMENT = re.compile(r'--comment (?:"(?:[^"\\]|\\.)*"|\S+)')

Chains = dict[str, tuple[str, ...]]


class FakeIptables:
    """Tables of one family in memory, with the behaviour of the given backend.

    `texts` records restore input, `saves` counts reads. `counters` are the existing nfacct objects. `rejects` tells
    which rules the "kernel" rejects; every call raises `failure` while it is set. `on_restore` is called with each input
    before it takes effect, `restored` afterwards.
    """

    def __init__(self, backend: Backend = Backend.NFT, family: Family = Family.IPV4) -> None:
        self.backend = backend
        self.family = family
        self.tables: dict[str, Chains] = {}
        self.counters = set(NFACCT_NAMES)
        self.rejects: Callable[[str], bool] = lambda rule: False
        self.failure: KernelError | None = None
        self.on_restore: Callable[[str], None] = lambda text: None
        self.restored: Callable[[], None] = lambda: None
        self.texts: list[str] = []
        self.saves = 0

    def save(self, tables: Collection[str] | None = None) -> Ruleset:
        """See Iptables.save."""
        self.saves += 1
        self._fail()
        shown = {name: chains for name, chains in self.tables.items() if tables is None or name in tables}
        if tables is not None and len(tables) == 1 and not shown and self.backend is Backend.NFT:
            shown = {name: _new_table(name) for name in tables}
        return Ruleset(
            self.family,
            {
                ChainKey(table, name): chains[name]
                for table, chains in shown.items()
                for name in _order(table, chains)
            },
        )

    def chains(self, keys: Collection[ChainKey]) -> Ruleset:
        """See Iptables.chains."""
        self._fail()
        there = {key: self.tables.get(key.table, {}).get(key.chain) for key in keys}
        return Ruleset(self.family, {key: rules for key, rules in there.items() if rules is not None})

    def has_chain(self, key: ChainKey) -> bool:
        """See Iptables.has_chain."""
        self._fail()
        return key.chain in self.tables.get(key.table, {})

    def has_rule(self, key: ChainKey, rule: str) -> bool:
        """See Iptables.has_rule."""
        self._fail()
        return rule in self.tables.get(key.table, {}).get(key.chain, ())

    @contextmanager
    def session(self, seconds: float | None = None) -> Iterator["FakeSession"]:
        """See Iptables.session; the input is applied at the end."""
        session = FakeSession()
        yield session
        self.restore("".join(session.written))

    def restore(self, text: str) -> None:
        """See Iptables.restore."""
        if not text:
            return
        self.texts.append(text)
        self._fail()
        self.on_restore(text)
        for table, chains in self._execute(text):
            self.tables[table] = chains
        self.restored()

    def _fail(self) -> None:
        if self.failure:
            raise self.failure

    def _execute(self, text: str) -> Iterator[tuple[str, Chains]]:
        block: _Block | None = None
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            if not line or line.startswith("#"):
                continue
            if block is None:
                if not line.startswith("*"):
                    raise Rejected(number, line, "failed", 1)
                block = self._begin(line[1:])
            elif line == "COMMIT":
                block.finish(number)
                yield block.table, block.chains
                block = None
            else:
                block.line(number, line)
        if block is not None:
            raise Rejected(len(lines), lines[-1], "COMMIT expected", 1)

    def _begin(self, table: str) -> "_Block":
        if table not in BUILT_IN:
            raise Failed("iptables-restore", 2, f"table name '{table}' invalid")
        return _Block(self, table, dict(self.tables.get(table) or _new_table(table)))


def fail_on(
    pattern: str,
    error: KernelError | None = None,
    times: int = 1_000_000,
    note: Callable[[], None] = lambda: None,
) -> Callable[[str], None]:
    """Return a function for `on_restore`: after a note, so many inputs that match fail."""
    left = [error or Failed("iptables-restore", 1, "out of memory")] * times

    def fail(text: str) -> None:
        if left and re.search(pattern, text):
            note()
            raise left.pop()

    return fail


class FakeSession:
    """Records its input."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> None:
        self.written.append(text)


class _Block:
    """One block of restore input, applied to a copy of the table."""

    def __init__(self, owner: FakeIptables, table: str, chains: Chains) -> None:
        self.owner = owner
        self.table = table
        self.chains = chains
        self._nft = owner.backend is Backend.NFT
        # The nft backend parses the whole block before it checks chains; the kernel checks last in both backends.
        self._read: list[tuple[int, str]] = []
        self._refused: list[Rejected] = []
        self._references: set[str] | None = None

    def line(self, number: int, line: str) -> None:
        """Read one line, or raise Rejected."""
        match = _CHAIN.match(line) or _COMMAND.match(line)
        if match is None:
            if line.startswith("-"):
                raise NotImplementedError(f"the stand-in does not know {line!r}")
            raise Rejected(number, line, "Bad argument", 2)
        if line.startswith(":") and len(match[1]) > 28:
            raise Rejected(number, line, "chain name too long", 2)
        if unknown := [name for name in _values(line, "-m") if name not in MATCHES]:
            raise Rejected(number, line, f"Couldn't load match `{unknown[0]}'", 2)
        if self._nft:
            self._read.append((number, line))
        else:
            self._carry_out(number, line)

    def _carry_out(self, number: int, line: str) -> None:
        if match := _CHAIN.match(line):
            if match[1] not in BUILT_IN[self.table]:
                self._put(match[1], ())
            return
        match = _COMMAND.match(line)
        assert match
        command, chain, rest = match[1], match[2] or "", match[3] or ""
        if command in "ADI":
            self._change(number, line, command, chain, rest)
        elif command == "N":
            self._require(chain not in self.chains, number, line, "Chain already exists.")
            self._put(chain, ())
        elif command == "F":
            self._require(not chain or chain in self.chains, number, line)
            for name in [chain] if chain else list(self.chains):
                self._put(name, ())
        elif command == "X":
            for name in [chain] if chain else [n for n in self.chains if n not in BUILT_IN[self.table]]:
                self._delete(number, line, name)

    def finish(self, number: int) -> None:
        """Check at COMMIT what the kernel checks then."""
        for at, line in self._read:
            self._carry_out(at, line)
        if self._nft and self._read and self._jumps() > _NFT_JUMPS:
            self._refused.append(Rejected(*self._read[-1], "RULE_APPEND failed (Too many links)", 4))
        if self._refused:
            first = self._refused[0]
            raise first if self._nft else Rejected(number, "COMMIT", "the kernel rejected the block", 1)

    def _jumps(self) -> int:
        """Return the longest sequence of jumps from a built-in chain."""
        jumps: dict[str, int] = {}

        def below(chain: str) -> int:
            if chain not in jumps:
                targets = {rule.rpartition("-j ")[2] for rule in self.chains[chain]}
                jumps[chain] = max((1 + below(it) for it in targets if it in self.chains), default=0)
            return jumps[chain]

        return max(map(below, BUILT_IN[self.table]))

    def _change(self, number: int, line: str, command: str, chain: str, rest: str) -> None:
        position = 0
        if command != "A" and (numbered := re.match(r"(\d+)(?: |$)", rest)):
            position = int(numbered[1])
            rest = rest[numbered.end() :]
        rule = canonical(rest)
        if rule:
            self._check(number, line, rule)
        self._require(chain in self.chains, number, line)
        rules = list(self.chains[chain])
        if command == "A":
            rules.append(rule)
        elif command == "I":
            self._require(position <= len(rules) + 1, number, line, "Index of insertion too big.")
            rules.insert(max(position - 1, 0), rule)
        elif position:
            self._require(position <= len(rules), number, line, "Index of deletion too big.")
            del rules[position - 1]
        else:
            self._require(
                rule in rules, number, line, "Bad rule (does a matching rule exist in that chain?)."
            )
            rules.remove(rule)
        self._put(chain, tuple(rules))

    def _check(self, number: int, line: str, rule: str) -> None:
        """Raise Rejected if the tools or the kernel reject the rule."""
        for target in (*_values(rule, "-j"), *_values(rule, "-g")):
            if target not in TARGETS and target not in self.chains:
                raise Rejected(number, line, f"Chain '{target}' does not exist", 2)
        if not self.owner.counters.issuperset(_values(rule, "--nfacct-name")):
            self._refused.append(Rejected(number, line, "RULE_APPEND failed (No such file or directory)", 4))
        if self.owner.rejects(rule):
            self._refused.append(Rejected(number, line, "RULE_APPEND failed (Invalid argument)", 4))

    def _delete(self, number: int, line: str, name: str) -> None:
        self._require(name in self.chains and name not in BUILT_IN[self.table], number, line)
        if self._references is None:
            every = [rule for rules in self.chains.values() for rule in rules]
            self._references = {
                target for rule in every for target in (*_values(rule, "-j"), *_values(rule, "-g"))
            }
        if self.chains[name] or name in self._references:
            refused = Rejected(
                number, line, "CHAIN_DEL failed (Device or resource busy)", 4 if self._nft else 1
            )
            if not self._nft:
                raise refused
            self._refused.append(refused)
        del self.chains[name]

    def _put(self, chain: str, rules: tuple[str, ...]) -> None:
        self.chains[chain] = rules
        self._references = None

    def _require(
        self, fine: bool, number: int, line: str, message: str = "No chain/target/match by that name."
    ) -> None:
        if not fine:
            raise Rejected(number, line, message, 1)


def _values(rule: str, option: str) -> list[str]:
    """Return the values of an option in a rule, outside its comment."""
    if f"{option} " not in rule:
        return []
    words = _COMMENT.sub("", rule).split()
    return [value for word, value in pairwise(words) if word == option]


def _new_table(table: str) -> Chains:
    return dict.fromkeys(BUILT_IN[table], ())


def _order(table: str, chains: Chains) -> list[str]:
    """Return chain names in the order of iptables-save: built-in ones first, then by name."""
    return [*BUILT_IN[table], *sorted(name for name in chains if name not in BUILT_IN[table])]
