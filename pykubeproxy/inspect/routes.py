"""From the chain that a frontend leads to, to the endpoints: by which traffic policy, and with which probability."""

import enum
from collections.abc import Iterator

import msgspec

from pykubeproxy.inspect.frontends import RuleAt
from pykubeproxy.inspect.rule import Rule, read
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey, Ruleset


class Policy(enum.Enum):
    """The traffic policy: endpoints anywhere, or only those of this node."""

    CLUSTER = "Cluster"
    LOCAL = "Local"


class Route(msgspec.Struct, frozen=True):
    """Where the packets to a frontend go.

    - `chain`: the one that balances; "" if there is none, for want of endpoints under policy Local
    - `shortcut`: the chain for packets of this node and its pods, where they go another way
    - `source_ranges`: who may come; empty for everybody
    """

    policy: Policy
    chain: str
    shortcut: str = ""
    source_ranges: tuple[str, ...] = ()


class Share(msgspec.Struct, frozen=True):
    """An endpoint ("ip:port" or "[ip]:port"), the probability that it gets a new connection, and its DNAT rule."""

    target: str
    probability: float
    rule: RuleAt


def route(ruleset: Ruleset, chain: str) -> Route:
    """The route from a chain that a frontend's rule jumps to."""
    if chain.startswith(names.FIREWALL_PREFIX):
        return _filtered(ruleset, chain)
    if chain.startswith(names.EXTERNAL_PREFIX):
        return _external(ruleset, chain)
    return Route(Policy.LOCAL if chain.startswith(names.LOCAL_PREFIX) else Policy.CLUSTER, chain)


def shares(ruleset: Ruleset, chain: str) -> tuple[Share, ...]:
    """The endpoints that a chain balances over, in the order of its rules.

    Jumps are followed through any number of chains and their probabilities multiplied; what matches on more than
    chance, such as affinity, is left out.
    """
    found: dict[str, Share] = {}
    _flow(ruleset, chain, 1.0, found)
    return tuple(found.values())


def affinity_seconds(ruleset: Ruleset, chain: str) -> int | None:
    """For how long a client stays with its endpoint; None without affinity."""
    for rule in _rules(ruleset, chain):
        if "--rcheck" in rule.options:
            return int(rule.options.get("--seconds", "0"))
    return None


def chains_from(ruleset: Ruleset, *chains: str) -> tuple[ChainKey, ...]:
    """Chains of table nat and all that they lead to, each after every one that jumps to it."""
    done: dict[ChainKey, None] = {}

    def visit(key: ChainKey) -> None:
        if key in ruleset.chains and key not in done:
            for rule in reversed(list(_rules(ruleset, key.chain))):
                visit(ChainKey("nat", rule.target))
            done[key] = None

    for chain in reversed(chains):
        visit(ChainKey("nat", chain))
    return tuple(reversed(done))


def _filtered(ruleset: Ruleset, chain: str) -> Route:
    """The route through a chain that lets only some sources on; the rest is dropped in table filter."""
    ranges, to = [], ""
    for rule in _rules(ruleset, chain):
        if rule.target.startswith(names.EXTERNAL_PREFIX):
            to = rule.target
            ranges.append(rule.options.get("-s", ""))
    onward = route(ruleset, to) if to else Route(Policy.CLUSTER, "")
    return msgspec.structs.replace(onward, source_ranges=tuple(dict.fromkeys(ranges)))


def _external(ruleset: Ruleset, chain: str) -> Route:
    """The route of external traffic; under policy Local that of this node and its pods goes another way."""
    to, shortcut = "", ""
    for rule in _rules(ruleset, chain):
        if names.is_owned(rule.target):
            to, shortcut = (rule.target, shortcut) if rule.unconditional else (to, rule.target)
    local = bool(shortcut) or to.startswith(names.LOCAL_PREFIX)
    return Route(Policy.LOCAL if local else Policy.CLUSTER, to, shortcut)


def _flow(ruleset: Ruleset, chain: str, weight: float, found: dict[str, Share]) -> float:
    """Let the share `weight` of all packets into a chain; returns how much of it comes back out."""
    left, returned = weight, 0.0
    key = ChainKey("nat", chain)
    for index, rule in enumerate(_rules(ruleset, chain)):
        if not rule.unconditional:
            continue
        taken = left * rule.probability
        if rule.target == "DNAT":
            target = rule.options.get("--to-destination", "")
            before = found[target].probability if target in found else 0.0
            found[target] = Share(target, before + taken, RuleAt(key, index))
            left -= taken
        elif rule.target == "RETURN":
            returned += taken
            left -= taken
        elif ChainKey("nat", rule.target) in ruleset.chains:
            left += _flow(ruleset, rule.target, taken, found) - taken
    return left + returned


def _rules(ruleset: Ruleset, chain: str) -> Iterator[Rule]:
    return (read(text) for text in ruleset.chains.get(ChainKey("nat", chain), ()))
