"""From the chains that services share to the frontends of services: which address and port leads to which chain."""

import enum
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.rule import Rule, read
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import SET_ASIDE

# Stands for all of a node's own addresses.
ANY_LOCAL = "*"


class FrontendKind(enum.Enum):
    """By what kind of address a service is reached."""

    CLUSTER_IP = "cluster-ip"
    EXTERNAL_IP = "external-ip"
    LOAD_BALANCER_IP = "load-balancer-ip"
    NODE_PORT = "node-port"


# The words with which comments in nat KUBE-SERVICES end.
_KINDS = {
    "cluster IP": FrontendKind.CLUSTER_IP,
    "external IP": FrontendKind.EXTERNAL_IP,
    "loadbalancer IP": FrontendKind.LOAD_BALANCER_IP,
}


class RuleAt(NamedTuple):
    """The place of a rule: the chain and the position in it, from 0."""

    key: ChainKey
    position: int


class Frontend(msgspec.Struct, frozen=True):
    """An address and port at which a service is reached.

    A node port's address is "*" for all addresses of the node, or one of those that serve node ports.
    """

    kind: FrontendKind
    address: str
    port: int


class Found(msgspec.Struct, frozen=True):
    """A rule for a frontend.

    - `title`: the service port as the comment names it, "namespace/name:port"; "" without a comment
    - `target`: the chain, or REJECT or DROP
    - `set_aside`: the service port is not served, for iptables refuses its rules
    - `path`: the rules a packet meets on the way, the one for the frontend last
    """

    title: str
    protocol: str
    frontend: Frontend
    target: str
    path: tuple[RuleAt, ...]
    set_aside: bool = False


def served(ruleset: Ruleset) -> Iterator[Found]:
    """The frontends that table nat leads to a chain of a service.

    Chains that only branch, however many levels of them, are followed: a rule is a frontend's only if it names one
    address and one port, or one node port.
    """
    return _nat(ruleset, skeleton.NAT_SERVICES, (), ())


def refused(ruleset: Ruleset) -> Iterator[Found]:
    """The frontends that table filter refuses (REJECT) or drops (DROP), for want of endpoints or as set aside.

    Of what is set aside there may be no more than a note: a rule for a cluster IP without a target.
    """
    for key in (skeleton.FILTER_SERVICES, skeleton.FILTER_EXTERNAL):
        for index, rule in _rules(ruleset, key):
            set_aside, path = rule.comment.endswith(SET_ASIDE), (RuleAt(key, index),)
            if set_aside and not rule.target and rule.destination:
                frontend = Frontend(FrontendKind.CLUSTER_IP, rule.destination, _noted_port(rule))
                yield Found(_title(rule), rule.protocol, frontend, "", path, set_aside)
            if rule.target not in ("REJECT", "DROP") or not rule.port:
                continue
            # For load balancers' IPs the rules are the same as for external IPs.
            kind = FrontendKind.CLUSTER_IP if key == skeleton.FILTER_SERVICES else FrontendKind.EXTERNAL_IP
            frontend = Frontend(
                kind if rule.destination else FrontendKind.NODE_PORT, rule.destination or ANY_LOCAL, rule.port
            )
            yield Found(_title(rule), rule.protocol, frontend, rule.target, path, set_aside)


def health_checks(ruleset: Ruleset) -> dict[str, int]:
    """The health check node ports by the titles of their service ports."""
    rules = (rule for _, rule in _rules(ruleset, skeleton.FILTER_NODEPORTS))
    return {_title(rule): rule.port for rule in rules if rule.port and rule.target == "ACCEPT"}


def _nat(
    ruleset: Ruleset, key: ChainKey, path: tuple[RuleAt, ...], node_addresses: tuple[str, ...]
) -> Iterator[Found]:
    for index, rule in _rules(ruleset, key):
        to = ChainKey("nat", rule.target)
        way = (*path, RuleAt(key, index))
        if to not in ruleset.chains:
            continue
        if to == skeleton.NAT_NODEPORTS:
            yield from _nat(ruleset, to, way, (rule.destination or ANY_LOCAL,))
        elif rule.port and (node_addresses or rule.destination):
            for address in node_addresses or (rule.destination,):
                kind = FrontendKind.NODE_PORT if node_addresses else _kind(rule)
                yield Found(_title(rule), rule.protocol, Frontend(kind, address, rule.port), rule.target, way)
        elif names.is_owned(rule.target):
            yield from _nat(ruleset, to, way, node_addresses)


def _rules(ruleset: Ruleset, key: ChainKey) -> Iterator[tuple[int, Rule]]:
    return ((index, read(text)) for index, text in enumerate(ruleset.chains.get(key, ())))


def _kind(rule: Rule) -> FrontendKind:
    if kind := _KINDS.get(rule.comment.partition(" ")[2]):
        return kind
    if rule.target.startswith(names.FIREWALL_PREFIX):
        return FrontendKind.LOAD_BALANCER_IP
    external = rule.target.startswith(names.EXTERNAL_PREFIX)
    return FrontendKind.EXTERNAL_IP if external else FrontendKind.CLUSTER_IP


def _noted_port(rule: Rule) -> int:
    """The port in the comment "ns/name:port port 80 is set aside"."""
    number = rule.comment.removesuffix(SET_ASIDE).split()[-1]
    return int(number) if number.isdecimal() else 0


def _title(rule: Rule) -> str:
    """The service port that a comment begins with: "ns/name:port cluster IP", "ns/name has no endpoints"."""
    first = rule.comment.partition(" ")[0]
    return first if "/" in first else ""
