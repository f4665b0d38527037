"""Read what `nft -j list ruleset` prints: the tables of one family as a value, without those of iptables."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgspec

from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import BUILT_IN, IPTABLES_TABLES, ChainKey
from pykubeproxy.rules.save_files import InvalidSave, check_targets

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_ADVICE = "give the unchanged output of `nft -j list ruleset`"
# The families of tables that packets of a family meet.
_FAMILIES = {Family.IPV4: ("ip", "inet"), Family.IPV6: ("ip6", "inet")}
_HOOKS = frozenset(name.lower() for name in BUILT_IN)
_OF_IP = ("ip", "ip6", "inet")
# The chains and named sets in the JSON of a rule or of elements.
JUMPS = re.compile(rb'"(?:jump|goto)": ?\{"target": ?"([^"]+)"')
NAMED_SETS = re.compile(rb'"@([^"]+)"')


class SetKey(NamedTuple):
    """The table and name of a set or map."""

    table: str
    name: str


class NftRule(msgspec.Struct, frozen=True):
    """A rule. `json` has its statements."""

    json: bytes
    comment: str = ""

    @property
    def statements(self) -> Sequence[Mapping[str, Json]]:
        return _statements(self.json)


@lru_cache(maxsize=1 << 14)
def _statements(json: bytes) -> Sequence[Mapping[str, Json]]:
    found: Sequence[Mapping[str, Json]] = msgspec.json.decode(json)
    return found


class NftChain(msgspec.Struct, frozen=True):
    """A chain and its rules. `hook` is "" if packets enter it only by jumps; `kind` is its type, "nat" or another."""

    rules: tuple[NftRule, ...]
    hook: str = ""
    priority: int = 0
    kind: str = ""
    drops: bool = False


class NftSet(msgspec.Struct, frozen=True):
    """A set or map. `json` has its elements; `timeout` is for how many seconds they stay, 0 for ever."""

    json: bytes
    timeout: int = 0

    @property
    def elements(self) -> Sequence[Json]:
        found: Sequence[Json] = msgspec.json.decode(self.json)
        return found


class NftRuleset(msgspec.Struct, frozen=True):
    """The nftables tables that packets of a family meet, such as "inet firewalld".

    - `iptables`: the tables of iptables-nft, which iptables-save shows
    - `not_evaluated`: chains and flowtables that packets may meet elsewhere, such as in a bridge
    """

    family: Family
    chains: Mapping[ChainKey, NftChain] = {}
    sets: Mapping[SetKey, NftSet] = {}
    iptables: tuple[str, ...] = ()
    not_evaluated: tuple[str, ...] = ()

    def tables(self) -> tuple[str, ...]:
        """Return the names of the tables with their families, in order of appearance."""
        return tuple(dict.fromkeys(key.table for key in self.chains))


def anonymous_elements(data: Json) -> Sequence[Json]:
    """Return the elements of an anonymous set; any other value is its own."""
    match data:
        case {"set": list(elements)}:
            return elements
        case {"set": element}:
            return (element,)
    return (data,)


def element_key(element: Json) -> Json:
    """Return an element of a set, or the key of one of a map, without its comment or timeout."""
    match element:
        case {"elem": {"val": key}}:
            return key
    return element


def incoming_interfaces(rule: NftRule) -> Iterator[str]:
    """Yield the interfaces that a rule names for packets that come in, without "*" at their end."""
    for statement in rule.statements:
        match statement:
            case {"match": {"left": {"meta": {"key": "iifname"}}, "right": str(name)}}:
                yield name.removesuffix("*")


class _ListedChain(msgspec.Struct):
    family: str
    table: str
    name: str
    type: str = ""
    hook: str = ""
    prio: int = 0
    policy: str | None = None

    @property
    def key(self) -> ChainKey:
        return ChainKey(f"{self.family} {self.table}", self.name)


class _ListedRule(msgspec.Struct):
    family: str
    table: str
    chain: str
    expr: msgspec.Raw = msgspec.Raw(b"[]")
    comment: str = ""


class _ListedSet(msgspec.Struct):
    family: str
    table: str
    name: str
    elem: msgspec.Raw = msgspec.Raw(b"[]")
    timeout: int = 0


class _ListedItem(msgspec.Struct):
    chain: _ListedChain | None = None
    rule: _ListedRule | None = None
    set: _ListedSet | None = None
    map: _ListedSet | None = None
    flowtable: _ListedSet | None = None


class _Listing(msgspec.Struct):
    nftables: list[_ListedItem]


def is_nft_list(text: str) -> bool:
    """Return whether a text is JSON, as nft prints it with -j."""
    return text.lstrip()[:1] == "{"


def read_nft_lists(texts: Iterable[str | bytes], name: str) -> Mapping[Family, NftRuleset]:
    """Read the tables that nft prints, in one text or in one for each table. Raises InvalidSave, which says `name`."""
    items: list[_ListedItem] = []
    for text in texts:
        try:
            items += msgspec.json.decode(text, type=_Listing).nftables
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise InvalidSave(f"{name}: {error}; {_ADVICE}") from None
    return {family: _ruleset(family, items, name) for family in Family}


def _ruleset(family: Family, items: Sequence[_ListedItem], name: str) -> NftRuleset:
    chains = [item.chain for item in items if item.chain]
    iptables = {chain.key.table for chain in chains if _is_of_iptables(chain)}
    families = _FAMILIES[family]
    rules: dict[ChainKey, list[NftRule]] = {
        chain.key: [] for chain in chains if chain.family in families and chain.key.table not in iptables
    }
    for rule in (item.rule for item in items if item.rule):
        key = ChainKey(f"{rule.family} {rule.table}", rule.chain)
        if key in rules:
            rules[key].append(NftRule(_checked(rule.expr, name), rule.comment))
    named = (one for item in items if (one := item.set or item.map) and one.family in families)
    sets = {
        SetKey(f"{one.family} {one.table}", one.name): NftSet(bytes(one.elem), one.timeout) for one in named
    }
    found = NftRuleset(
        family,
        {
            chain.key: NftChain(
                tuple(rules[chain.key]), chain.hook, chain.prio, chain.type, chain.policy == "drop"
            )
            for chain in chains
            if chain.key in rules
        },
        {key: one for key, one in sets.items() if key.table not in iptables},
        tuple(sorted(table.split()[1] for table in iptables if table.split()[0] in families)),
        tuple(_not_evaluated(items)),
    )
    try:
        check_targets(_targets(found))
    except ValueError as error:
        raise InvalidSave(f"{name}: {error}") from None
    return found


def _checked(statements: msgspec.Raw, name: str) -> bytes:
    """Return the statements of a rule. Raises InvalidSave if they are of another form than nft prints."""
    try:
        found = msgspec.json.decode(statements, type=list[dict[str, msgspec.Raw]])
    except msgspec.MsgspecError as error:
        raise InvalidSave(f"{name}: a rule is invalid: {error}; {_ADVICE}") from None
    if any(len(statement) != 1 for statement in found):
        raise InvalidSave(f"{name}: a rule is invalid: a statement has several kinds; {_ADVICE}")
    return bytes(statements)


def _is_of_iptables(chain: _ListedChain) -> bool:
    """Return whether a base chain is one that iptables-nft makes."""
    return chain.family in ("ip", "ip6") and chain.table in IPTABLES_TABLES and chain.name in BUILT_IN


def _not_evaluated(items: Iterable[_ListedItem]) -> Iterator[str]:
    for item in items:
        if item.flowtable and item.flowtable.family in _OF_IP:
            yield f"flowtable {item.flowtable.name} of table {item.flowtable.family} {item.flowtable.table}"
        chain = item.chain
        if not chain or not chain.hook or chain.family == "arp":
            continue
        if chain.family not in _OF_IP or chain.hook not in _HOOKS:
            yield f"chain {chain.name} of table {chain.key.table} at hook {chain.hook}"


def _targets(ruleset: NftRuleset) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return the chains to which those of each table jump, by way of named maps too."""
    of_sets = {key: JUMPS.findall(one.json) for key, one in ruleset.sets.items()}
    found: dict[str, dict[str, list[str]]] = {}
    for key, chain in ruleset.chains.items():
        jumps: dict[bytes, None] = {}
        for rule in chain.rules:
            jumps.update(dict.fromkeys(JUMPS.findall(rule.json)))
            for name in NAMED_SETS.findall(rule.json):
                jumps.update(dict.fromkeys(of_sets.get(SetKey(key.table, name.decode()), ())))
        targets = [jump.decode() for jump in jumps]
        found.setdefault(key.table, {})[key.chain] = [
            target for target in targets if ChainKey(key.table, target) in ruleset.chains
        ]
    return found
