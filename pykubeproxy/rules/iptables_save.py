"""Read the output of iptables-save: tables, chains, rules, and the options of a rule.

`parse` reads all chains at once. `read_counted` only notes where each chain stands, and reads a chain on access. For
55,000 chains it takes two thirds of the time, but to read all chains through it takes nearly twice the memory.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import TypeVar

import msgspec

from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey, Count, Counters, Ruleset

_T = TypeVar("_T")
# Chains that are not built in have the policy "-".
_NO_POLICY = ("-", "ACCEPT")
# A line of iptables-save: a rule with its chain, a chain with its policy, a table, something to ignore, or anything else.
# With counters, a rule starts with a pair such as [12:3456].
_SAVED_LINE = re.compile(
    r"^(?:(?:\[\d+:\d+\] )?-A (\S+) ?(.*)|:([^ \n]*) ?([^ \n]*).*|\*(.*)|#.*|COMMIT|(.+)|)$", re.MULTILINE
)
# Line numbers of each chain's rules, by table and chain. The garbage collector does not track ranges.
_Lines = dict[str, dict[str, range]]
_NO_LINES = range(0)
# The line breaks of str.splitlines, and a quoted comment that contains one.
_BREAKS = "\\n\\r\\v\\f\\x1c-\\x1e\\x85\\u2028\\u2029"
_BREAK = re.compile(f"[{_BREAKS}]")
_BROKEN_COMMENT = re.compile(
    rf'--comment "[^"\\{_BREAKS}]*+(?:\\.[^"\\{_BREAKS}]*+)*+[{_BREAKS}][^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL
)


def canonical(saved: str) -> str:
    """Return the output of iptables-save, of any version, in the form in which we write rules.

    A rule in this form reads back byte for byte on both backends. Remove the second space that iptables prints before the
    name of an nfacct object, and the one that nft up to 1.8.7 prints after a rule without a target. Replace line breaks
    in comments by spaces, so that a rule is one line and no part of a comment looks like a rule.
    """
    saved = _BROKEN_COMMENT.sub(lambda comment: _BREAK.sub(" ", comment[0]), saved)
    return saved.replace("--nfacct-name  ", "--nfacct-name ").replace(" \n", "\n")


def parse(family: Family, text: str) -> Ruleset:
    """Parse the output of iptables-save, with or without counters. Raises ValueError with the line that is invalid."""
    chains: dict[ChainKey, list[str]] = {}
    policies: dict[ChainKey, str] = {}
    table, of_table = "", dict[str, list[str]]()
    for line in _SAVED_LINE.finditer(text):
        chain, rule, declared, policy, header, other = line.groups()
        if header is not None:
            table, of_table = header.strip(), {}
        elif other is not None or (not table and (chain or declared is not None)):
            number = text.count("\n", 0, line.start()) + 1
            raise ValueError(f"line {number} is not of the form iptables-save prints: {line[0]!r}")
        elif chain:
            if chain not in of_table:
                of_table[chain] = chains.setdefault(ChainKey(table, chain), [])
            of_table[chain].append(rule)
        elif declared is not None:
            of_table[declared] = chains.setdefault(ChainKey(table, declared), [])
            if (policy or "-") not in _NO_POLICY:
                policies[ChainKey(table, declared)] = policy
    return Ruleset(family, {key: tuple(rules) for key, rules in chains.items()}, policies)


def read_counted(family: Family, text: str) -> tuple[Ruleset, Counters]:
    """Read the output of `iptables-save --counters`, in which the rules of a chain are adjacent.

    Much faster than `parse` if few chains are read. Raises ValueError as `parse` does.
    """
    lines = text.split("\n")
    try:
        positions, policies = _index(lines)
    except IndexError:
        raise ValueError("a rule with counts is not of the form iptables-save prints") from None
    ruleset = Ruleset(family, _LazyChains(lines, positions, _rule), policies)
    return ruleset, _LazyChains(lines, positions, _count)


def _index(lines: list[str]) -> tuple[_Lines, dict[ChainKey, str]]:
    """Return the line numbers of each chain and the policies other than ACCEPT."""
    positions: _Lines = {}
    policies: dict[ChainKey, str] = {}
    chains: dict[str, range] | None = None
    table, start = "", 0
    # Such as "[12:720] -A KUBE-MARK-MASQ -j MARK ...": the third word.
    for chain, group in groupby(line.split(" ", 3)[2] if line[:1] == "[" else "" for line in lines):
        first, start = start, start + len([*group])
        if chain and chains is not None:
            if chains.get(chain):
                raise ValueError(f"line {first + 1}: the rules of chain {chain} are not together")
            chains[chain] = range(first, start)
            continue
        for number in range(first, start):
            line = lines[number]
            if line.startswith(":") and chains is not None:
                name, policy, *_ = f"{line[1:]} -".split(" ", 2)
                chains.setdefault(name, _NO_LINES)
                if policy not in _NO_POLICY:
                    policies[ChainKey(table, name)] = policy
            elif line.startswith("*"):
                table = line[1:].strip()
                chains = positions.setdefault(table, {})
            elif line and not line.startswith("#") and line != "COMMIT":
                raise ValueError(f"line {number + 1} is not of the form iptables-save prints: {line!r}")
    return positions, policies


class _LazyChains(Mapping[ChainKey, tuple[_T, ...]]):
    """The results of `read` for the rules of each chain, computed on access."""

    def __init__(self, lines: list[str], positions: _Lines, read: Callable[[str], _T]) -> None:
        self._lines = lines
        self._positions = positions
        self._read = read

    def __getitem__(self, key: ChainKey) -> tuple[_T, ...]:
        position = self._positions[key.table][key.chain]
        return tuple(map(self._read, self._lines[position.start : position.stop]))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, ChainKey) and key.chain in self._positions.get(key.table, ())

    def __iter__(self) -> Iterator[ChainKey]:
        return (ChainKey(table, chain) for table, chains in self._positions.items() for chain in chains)

    def __len__(self) -> int:
        return sum(map(len, self._positions.values()))


def _rule(line: str) -> str:
    # The rule follows the counts, -A and the name of the chain; an empty rule lacks the last space.
    return "".join(line.split(" ", 3)[3:])


def _count(line: str) -> Count:
    packets, _, size = line[1 : line.index("]")].partition(":")
    return Count(int(packets), int(size))


# An option, after "!" if it is negated, with the values that follow it.
_OPTION = re.compile(
    r'(?<!\S)(!\s+)?(-[^\s\d]\S*)((?:\s+(?:"(?:[^"\\]|\\.)*"|[^-!"\s]\S*|(?!-[^\s\d]|!\s)\S+))*)'
)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_TARGET = re.compile(r"(?:.* )?-[jg] (\S+)")
_COMMENT = re.compile(r'-m comment --comment (?:"[^"\\]*(?:\\.[^"\\]*)*"|\S+) ?')
_PROBABILITY = re.compile(r"[01]\.[0-9]{1,20}|[01]")
_NUMBER = re.compile(r"[0-9]{1,10}")
# Options that do not narrow which packets a rule applies to, apart from chance and protocol.
_UNCONDITIONAL = frozenset(
    {"-m", "-p", "-j", "-g", "--comment", "--mode", "--probability", "--to-destination", "--set-xmark"}
    | {"--set", "--name", "--mask", "--rsource", "--random", "--persistent", "--nfacct-name"}
)


class ParsedRule(msgspec.Struct, frozen=True, gc=False):
    """The options of a rule with their values: "" without a value, "! " before a negated one.

    Of an option that occurs several times, such as `-m`, the last value is kept.
    """

    options: Mapping[str, str]

    @property
    def target(self) -> str:
        """The chain or built-in target; "" for a rule that only counts."""
        return self.options.get("-j") or self.options.get("-g", "")

    @property
    def comment(self) -> str:
        return self.options.get("--comment", "")

    @property
    def title(self) -> str:
        """The service port at the start of a comment: "ns/name:port cluster IP"; "" if there is none."""
        first = self.comment.partition(" ")[0]
        return first if "/" in first else ""

    @property
    def probability(self) -> float:
        """The probability with which the rule takes a packet that meets its other conditions; 0 if unreadable."""
        try:
            return parse_probability(self.options.get("--probability", "1"))
        except ValueError:
            return 0.0

    @property
    def unconditional(self) -> bool:
        """Whether the rule applies to every packet, apart from chance and protocol."""
        return self.options.keys() <= _UNCONDITIONAL

    @property
    def destination(self) -> str:
        """The single destination address, without prefix length; "" for networks and negations."""
        address, _, length = self.options.get("-d", "").partition("/")
        single = length in ("", "128" if ":" in address else "32")
        return address if single and not address.startswith("!") else ""

    @property
    def port(self) -> int:
        """The single destination port; 0 for ranges and negations."""
        return parse_number(self.options.get("--dport", ""))

    @property
    def seconds(self) -> int:
        """The timeout of an affinity; 0 if there is none."""
        return parse_number(self.options.get("--seconds", ""))

    @property
    def protocol(self) -> str:
        """The protocol as Kubernetes writes it: TCP."""
        return self.options.get("-p", "").upper()


def parse_rule(text: str) -> ParsedRule:
    """Parse a rule."""
    return ParsedRule(
        {name: f"! {value}" if negated else value for name, value, negated in parse_options(text)}
    )


def parse_options(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the options of a rule in order: name, values joined by spaces and unquoted, whether negated."""
    for negation, name, values in _OPTION.findall(text):
        yield name, _value(values), bool(negation)


def _value(text: str) -> str:
    """Return the values of an option, without the space before them and without quotes."""
    if '"' not in text:
        return text[1:]
    if "\\" not in text and text.count('"') == 2:
        return text[1:].replace('"', "")
    return _QUOTED.sub(lambda quoted: _ESCAPED.sub(r"\1", quoted[1]), text)[1:]


def parse_number(text: str) -> int:
    """Return a port or another number; 0 for any other text."""
    return int(text) if _NUMBER.fullmatch(text) else 0


def parse_probability(text: str) -> float:
    """Return a probability. Raises ValueError."""
    if not _PROBABILITY.fullmatch(text) or float(text) > 1:
        raise ValueError(f"{text!r} is no probability")
    return float(text)


def parse_target(text: str) -> str:
    """Return the target alone, ten times as fast as `parse_rule`."""
    match = _TARGET.match(text)
    return match[1] if match else ""


def without_comment(text: str) -> str:
    """Return a rule's text without its comment."""
    return (_COMMENT.sub("", text) if "--comment" in text else text).strip()
