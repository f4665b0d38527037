"""Find the rules for frontends in shared chains, and follow them to endpoints: policy, source ranges, shares."""

import enum
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.iptables_save import ParsedRule, parse_number, parse_rule
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import QUARANTINED_COMMENT
from pykubeproxy.services.ports import ANY_LOCAL, Frontend, FrontendKind

# Several times the rules of table nat in a cluster with 300,000 endpoints.
_MOST_RULES = 5_000_000
# Walks go through the rules for node ports once for each address of the node.
_LEAST_RULES, _TIMES = 100_000, 50
# The ends of comments in nat KUBE-SERVICES.
_KINDS = {
    "cluster IP": FrontendKind.CLUSTER_IP,
    "external IP": FrontendKind.EXTERNAL_IP,
    "loadbalancer IP": FrontendKind.LOAD_BALANCER_IP,
}


class RulePosition(NamedTuple):
    """A chain and the position of a rule in it, from 0."""

    key: ChainKey
    position: int


class FrontendRule(msgspec.Struct, frozen=True):
    """A rule for a frontend.

    - `title`: the service port in the comment, "namespace/name:port"; "" without a comment
    - `target`: a chain, REJECT or DROP; "" for a comment on a quarantined service port
    - `path`: the rules on the way, the one for the frontend last
    """

    title: str
    protocol: str
    frontend: Frontend
    target: str
    path: tuple[RulePosition, ...]
    quarantined: bool = False


def serving_rules(ruleset: Ruleset) -> Iterator[FrontendRule]:
    """Yield the rules of table nat that lead a frontend to a chain of its service.

    Follow chains of the dispatch tree: a rule belongs to a frontend only if it has a single address and port, or a
    node port, and a comment, if any, that names a service port.
    """
    return _nat(ruleset, skeleton.NAT_SERVICES, (), (), rule_limit())


def rejecting_rules(ruleset: Ruleset) -> Iterator[FrontendRule]:
    """Yield the rules of table filter that reject or drop a frontend's packets.

    For a quarantined service port there may be only a comment: a rule for a cluster IP without target.
    """
    # Rules for load balancer IPs look like those for external IPs.
    for key, kind in (
        (skeleton.FILTER_SERVICES, FrontendKind.CLUSTER_IP),
        (skeleton.FILTER_EXTERNAL, FrontendKind.EXTERNAL_IP),
    ):
        for path, rule in filter_rules(ruleset, key):
            quarantined = rule.comment.endswith(QUARANTINED_COMMENT)
            if quarantined and not rule.target and rule.destination:
                frontend = Frontend(FrontendKind.CLUSTER_IP, rule.destination, _comment_port(rule))
            elif rule.target in ("REJECT", "DROP") and (rule.port or quarantined):
                address = rule.destination or ANY_LOCAL
                frontend = Frontend(kind if rule.destination else FrontendKind.NODE_PORT, address, rule.port)
            else:
                continue
            yield FrontendRule(rule.title, rule.protocol, frontend, rule.target, path, quarantined)


def health_checks(ruleset: Ruleset) -> dict[str, int]:
    """Return the health check node ports by the titles of their service ports."""
    rules = (rule for _, rule in filter_rules(ruleset, skeleton.FILTER_NODEPORTS))
    return {rule.title: rule.port for rule in rules if rule.port and rule.target == "ACCEPT"}


def filter_rules(ruleset: Ruleset, key: ChainKey) -> Iterator[tuple[tuple[RulePosition, ...], ParsedRule]]:
    """Yield the rules of a shared chain of table filter and of the branches below it, each with the path to it."""
    limit = RuleLimit(_MOST_RULES)

    def below(
        key: ChainKey, path: tuple[RulePosition, ...]
    ) -> Iterator[tuple[tuple[RulePosition, ...], ParsedRule]]:
        limit.count(len(ruleset.chains.get(key, ())))
        for index, rule in parsed_rules(ruleset, key):
            to, path_here = ChainKey(key.table, rule.target), (*path, RulePosition(key, index))
            if not names.is_owned(to.chain):
                yield path_here, rule
            elif to in ruleset.chains:
                yield from below(to, path_here)

    return below(key, ())


def parsed_rules(ruleset: Ruleset, key: ChainKey) -> Iterator[tuple[int, ParsedRule]]:
    """Yield the rules of a chain with their positions."""
    return ((index, parse_rule(text)) for index, text in enumerate(ruleset.chains.get(key, ())))


def _nat(
    ruleset: Ruleset,
    key: ChainKey,
    path: tuple[RulePosition, ...],
    node_addresses: tuple[str, ...],
    limit: RuleLimit,
) -> Iterator[FrontendRule]:
    limit.enter(key, len(ruleset.chains.get(key, ())))
    for index, rule in parsed_rules(ruleset, key):
        to = ChainKey("nat", rule.target)
        path_here = (*path, RulePosition(key, index))
        if to not in ruleset.chains:
            continue
        if to == skeleton.NAT_NODEPORTS:
            yield from _nat(ruleset, to, path_here, (rule.destination or ANY_LOCAL,), limit)
        elif rule.port and (rule.title or not rule.comment) and (node_addresses or rule.destination):
            kind = FrontendKind.NODE_PORT if node_addresses else _kind(rule)
            for address in node_addresses or (rule.destination,):
                frontend = Frontend(kind, address, rule.port)
                yield FrontendRule(rule.title, rule.protocol, frontend, rule.target, path_here)
        elif names.is_owned(rule.target):
            yield from _nat(ruleset, to, path_here, node_addresses, limit)


def _kind(rule: ParsedRule) -> FrontendKind:
    if kind := _KINDS.get(rule.comment.partition(" ")[2]):
        return kind
    if rule.target.startswith(names.FIREWALL_PREFIX):
        return FrontendKind.LOAD_BALANCER_IP
    external = rule.target.startswith(names.EXTERNAL_PREFIX)
    return FrontendKind.EXTERNAL_IP if external else FrontendKind.CLUSTER_IP


def _comment_port(rule: ParsedRule) -> int:
    """Return the port in the comment "ns/name:port port 80 is quarantined"."""
    return parse_number(rule.comment.removesuffix(QUARANTINED_COMMENT).rstrip().rpartition(" ")[2])


class Policy(enum.Enum):
    """A traffic policy."""

    CLUSTER = "Cluster"
    LOCAL = "Local"


class PacketVerdict(enum.Enum):
    """What happens to a packet to a frontend."""

    DNAT = "dnat"
    REJECT = "reject"
    DROP = "drop"
    PASS = "pass"  # noqa: S105 - not a password


class PolicyRoute(msgspec.Struct, frozen=True):
    """Where packets to a frontend go.

    - `chain`: the balancing chain; "" under policy Local without local endpoints
    - `shortcut`: the chain for packets of this node and its pods, if it is another one
    - `source_ranges`: the allowed sources; None for all
    """

    policy: Policy
    chain: str
    shortcut: str = ""
    source_ranges: tuple[str, ...] | None = None


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


def rule_limit() -> RuleLimit:
    """Return a limit for walks through table nat of a node."""
    return RuleLimit(_MOST_RULES, _LEAST_RULES, _TIMES)


def shares(ruleset: Ruleset, chain: str, limit: RuleLimit | None = None) -> tuple[Share, ...]:
    """Return the endpoints that a chain balances over, in the order of its rules.

    Follow jumps and multiply their probabilities; skip rules with other conditions, such as affinity.
    """
    found: dict[str, Share] = {}
    _distribute(ruleset, chain, 1.0, found, limit or rule_limit())
    return tuple(found.values())


def affinity_seconds(ruleset: Ruleset, chain: str) -> int | None:
    """Return the timeout of session affinity; None without affinity."""
    for rule in _rules(ruleset, chain):
        if "--rcheck" in rule.options:
            return rule.seconds
    return None


def chains_from(ruleset: Ruleset, *chains: str, limit: RuleLimit | None = None) -> tuple[ChainKey, ...]:
    """Return chains of table nat and all chains below them, each after every chain that jumps to it."""
    done: dict[ChainKey, None] = {}
    counted = limit or rule_limit()

    def visit(key: ChainKey) -> None:
        if key in ruleset.chains and key not in done:
            counted.enter(key, len(ruleset.chains[key]))
            for rule in reversed(list(_rules(ruleset, key.chain))):
                visit(ChainKey("nat", rule.target))
            done[key] = None

    for chain in reversed(chains):
        visit(ChainKey("nat", chain))
    return tuple(reversed(done))


def _firewall_route(ruleset: Ruleset, chain: str) -> PolicyRoute:
    """Return the route through a chain that passes only some sources; table filter drops the rest."""
    to = names.EXTERNAL_PREFIX + chain.removeprefix(names.FIREWALL_PREFIX)
    ranges = [rule.options.get("-s", "") for rule in _rules(ruleset, chain) if rule.target == to]
    onward = _external_route(ruleset, to)
    return msgspec.structs.replace(onward, source_ranges=tuple(dict.fromkeys(ranges)))


def _external_route(ruleset: Ruleset, chain: str) -> PolicyRoute:
    """Return the route of external traffic; under policy Local this node and its pods have a shortcut."""
    to, shortcut = "", ""
    for rule in _rules(ruleset, chain):
        if names.is_owned(rule.target):
            to, shortcut = (rule.target, shortcut) if rule.unconditional else (to, rule.target)
    local = bool(shortcut) or to.startswith(names.LOCAL_PREFIX)
    return PolicyRoute(Policy.LOCAL if local else Policy.CLUSTER, to, shortcut)


def _distribute(
    ruleset: Ruleset, chain: str, weight: float, found: dict[str, Share], limit: RuleLimit
) -> float:
    """Send a share of all packets into a chain; return the share that leaves the chain again."""
    left, returned = weight, 0.0
    key = ChainKey("nat", chain)
    limit.enter(key, len(ruleset.chains.get(key, ())))
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
            left += _distribute(ruleset, rule.target, taken, found, limit) - taken
    return left + returned


def _rules(ruleset: Ruleset, chain: str) -> Iterator[ParsedRule]:
    return (rule for _, rule in parsed_rules(ruleset, ChainKey("nat", chain)))
