"""Find the rules for frontends in the chains that services share."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.parse import ParsedRule, parse_rule
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import QUARANTINED_COMMENT
from pykubeproxy.services.frontend import ANY_LOCAL, Frontend, FrontendKind

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
    node port.
    """
    return _nat(ruleset, skeleton.NAT_SERVICES, (), ())


def rejecting_rules(ruleset: Ruleset) -> Iterator[FrontendRule]:
    """Yield the rules of table filter that reject or drop a frontend's packets.

    For a quarantined service port there may be only a comment: a rule for a cluster IP without target.
    """
    # Rules for load balancer IPs look like those for external IPs.
    for key, kind in (
        (skeleton.FILTER_SERVICES, FrontendKind.CLUSTER_IP),
        (skeleton.FILTER_EXTERNAL, FrontendKind.EXTERNAL_IP),
    ):
        for index, rule in parsed_rules(ruleset, key):
            quarantined, path = rule.comment.endswith(QUARANTINED_COMMENT), (RulePosition(key, index),)
            if quarantined and not rule.target and rule.destination:
                frontend = Frontend(FrontendKind.CLUSTER_IP, rule.destination, _comment_port(rule))
            elif rule.target in ("REJECT", "DROP") and rule.port:
                address = rule.destination or ANY_LOCAL
                frontend = Frontend(kind if rule.destination else FrontendKind.NODE_PORT, address, rule.port)
            else:
                continue
            yield FrontendRule(rule.title, rule.protocol, frontend, rule.target, path, quarantined)


def health_checks(ruleset: Ruleset) -> dict[str, int]:
    """Return the health check node ports by the titles of their service ports."""
    rules = (rule for _, rule in parsed_rules(ruleset, skeleton.FILTER_NODEPORTS))
    return {rule.title: rule.port for rule in rules if rule.port and rule.target == "ACCEPT"}


def parsed_rules(ruleset: Ruleset, key: ChainKey) -> Iterator[tuple[int, ParsedRule]]:
    """Yield the rules of a chain with their positions."""
    return ((index, parse_rule(text)) for index, text in enumerate(ruleset.chains.get(key, ())))


def _nat(
    ruleset: Ruleset, key: ChainKey, path: tuple[RulePosition, ...], node_addresses: tuple[str, ...]
) -> Iterator[FrontendRule]:
    for index, rule in parsed_rules(ruleset, key):
        to = ChainKey("nat", rule.target)
        path_here = (*path, RulePosition(key, index))
        if to not in ruleset.chains:
            continue
        if to == skeleton.NAT_NODEPORTS:
            yield from _nat(ruleset, to, path_here, (rule.destination or ANY_LOCAL,))
        elif rule.port and (node_addresses or rule.destination):
            kind = FrontendKind.NODE_PORT if node_addresses else _kind(rule)
            for address in node_addresses or (rule.destination,):
                frontend = Frontend(kind, address, rule.port)
                yield FrontendRule(rule.title, rule.protocol, frontend, rule.target, path_here)
        elif names.is_owned(rule.target):
            yield from _nat(ruleset, to, path_here, node_addresses)


def _kind(rule: ParsedRule) -> FrontendKind:
    if kind := _KINDS.get(rule.comment.partition(" ")[2]):
        return kind
    if rule.target.startswith(names.FIREWALL_PREFIX):
        return FrontendKind.LOAD_BALANCER_IP
    external = rule.target.startswith(names.EXTERNAL_PREFIX)
    return FrontendKind.EXTERNAL_IP if external else FrontendKind.CLUSTER_IP


def _comment_port(rule: ParsedRule) -> int:
    """Return the port in the comment "ns/name:port port 80 is quarantined"."""
    number = rule.comment.removesuffix(QUARANTINED_COMMENT).split()[-1]
    return int(number) if number.isdecimal() else 0
