"""Follow the chains of a frontend to its endpoints: traffic policy, source ranges, shares."""

import enum
from collections.abc import Iterator

import msgspec

from pykubeproxy.inspect.frontends import RulePosition, parsed_rules
from pykubeproxy.rules import names
from pykubeproxy.rules.parse import ParsedRule
from pykubeproxy.rules.ruleset import ChainKey, Ruleset


class Policy(enum.Enum):
    """A traffic policy."""

    CLUSTER = "Cluster"
    LOCAL = "Local"


class Verdict(enum.Enum):
    """What happens to a packet to a frontend."""

    DNAT = "dnat"
    REJECT = "reject"
    DROP = "drop"
    PASS = "pass"  # noqa: S105 - not a password


class PolicyRoute(msgspec.Struct, frozen=True):
    """Where packets to a frontend go.

    - `chain`: the balancing chain; "" under policy Local without local endpoints
    - `shortcut`: the chain for packets of this node and its pods, if it is another one
    - `source_ranges`: the allowed sources; empty for all
    """

    policy: Policy
    chain: str
    shortcut: str = ""
    source_ranges: tuple[str, ...] = ()


class Share(msgspec.Struct, frozen=True):
    """An endpoint ("ip:port" or "[ip]:port"), its probability to get a new connection, and its DNAT rule."""

    target: str
    probability: float
    rule: RulePosition


def route(ruleset: Ruleset, chain: str) -> PolicyRoute:
    """Return the route from the target of a frontend's rule."""
    if chain.startswith(names.FIREWALL_PREFIX):
        return _firewall_route(ruleset, chain)
    if chain.startswith(names.EXTERNAL_PREFIX):
        return _external_route(ruleset, chain)
    return PolicyRoute(Policy.LOCAL if chain.startswith(names.LOCAL_PREFIX) else Policy.CLUSTER, chain)


def shares(ruleset: Ruleset, chain: str) -> tuple[Share, ...]:
    """Return the endpoints that a chain balances over, in the order of its rules.

    Follow jumps and multiply their probabilities; skip rules with other conditions, such as affinity.
    """
    found: dict[str, Share] = {}
    _distribute(ruleset, chain, 1.0, found)
    return tuple(found.values())


def affinity_seconds(ruleset: Ruleset, chain: str) -> int | None:
    """Return the timeout of session affinity; None without affinity."""
    for rule in _rules(ruleset, chain):
        if "--rcheck" in rule.options:
            return int(rule.options.get("--seconds", "0"))
    return None


def chains_from(ruleset: Ruleset, *chains: str) -> tuple[ChainKey, ...]:
    """Return chains of table nat and all chains below them, each after every chain that jumps to it."""
    done: dict[ChainKey, None] = {}

    def visit(key: ChainKey) -> None:
        if key in ruleset.chains and key not in done:
            for rule in reversed(list(_rules(ruleset, key.chain))):
                visit(ChainKey("nat", rule.target))
            done[key] = None

    for chain in reversed(chains):
        visit(ChainKey("nat", chain))
    return tuple(reversed(done))


def _firewall_route(ruleset: Ruleset, chain: str) -> PolicyRoute:
    """Return the route through a chain that passes only some sources; table filter drops the rest."""
    ranges, to = [], ""
    for rule in _rules(ruleset, chain):
        if rule.target.startswith(names.EXTERNAL_PREFIX):
            to = rule.target
            ranges.append(rule.options.get("-s", ""))
    onward = route(ruleset, to) if to else PolicyRoute(Policy.CLUSTER, "")
    return msgspec.structs.replace(onward, source_ranges=tuple(dict.fromkeys(ranges)))


def _external_route(ruleset: Ruleset, chain: str) -> PolicyRoute:
    """Return the route of external traffic; under policy Local this node and its pods have a shortcut."""
    to, shortcut = "", ""
    for rule in _rules(ruleset, chain):
        if names.is_owned(rule.target):
            to, shortcut = (rule.target, shortcut) if rule.unconditional else (to, rule.target)
    local = bool(shortcut) or to.startswith(names.LOCAL_PREFIX)
    return PolicyRoute(Policy.LOCAL if local else Policy.CLUSTER, to, shortcut)


def _distribute(ruleset: Ruleset, chain: str, weight: float, found: dict[str, Share]) -> float:
    """Send a share of all packets into a chain; return the share that leaves the chain again."""
    left, returned = weight, 0.0
    key = ChainKey("nat", chain)
    for index, rule in parsed_rules(ruleset, key):
        if not rule.unconditional:
            continue
        taken = left * rule.probability
        if rule.target == "DNAT":
            target = rule.options.get("--to-destination", "")
            before = found[target].probability if target in found else 0.0
            found[target] = Share(target, before + taken, RulePosition(key, index))
            left -= taken
        elif rule.target == "RETURN":
            returned += taken
            left -= taken
        elif ChainKey("nat", rule.target) in ruleset.chains:
            left += _distribute(ruleset, rule.target, taken, found) - taken
    return left + returned


def _rules(ruleset: Ruleset, chain: str) -> Iterator[ParsedRule]:
    return (rule for _, rule in parsed_rules(ruleset, ChainKey("nat", chain)))
