"""Render the chains that pick an endpoint and those that DNAT to it."""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pykubeproxy.config import Dispatch
from pykubeproxy.rules import names
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.text import host, printed, probability
from pykubeproxy.rules.tree import Tree
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import ServicePort

_AFFINITY_MASK = {False: "255.255.255.255", True: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}


# Above this many endpoints, first pick a group, then an endpoint of the group.
GROUPS_ABOVE = 128


def balance(
    port: ServicePort, chain: str, endpoints: Sequence[tuple[str, str]], options: RuleOptions
) -> Tree:
    """Return rules for `chain` that pick each endpoint with the same probability.

    `endpoints` are pairs of chain and target. A client with affinity returns to its last endpoint within
    `affinity_seconds`. The group of an endpoint depends on its target alone, so a new or removed endpoint changes only
    its own group and the probabilities.
    """
    choices = [_Choice(endpoint_chain, target, 1) for endpoint_chain, target in endpoints]
    affinity = tuple(_affinity_rules(port, choices, options))
    if options.dispatch is Dispatch.FLAT or len(endpoints) <= GROUPS_ABOVE:
        return Tree((*affinity, *_random_rules(port, choices, options)), ())
    groups = _groups(chain, choices)
    heads = [_Choice(name, f"{len(members)} endpoints", len(members)) for name, members in groups]
    return Tree(
        (*affinity, *_random_rules(port, heads, options)),
        tuple((name, tuple(_random_rules(port, members, options))) for name, members in groups),
    )


class _Choice(NamedTuple):
    """A chain to pick, its name in comments, and the number of its endpoints."""

    chain: str
    title: str
    weight: int


def _affinity_rules(port: ServicePort, choices: list[_Choice], options: RuleOptions) -> Iterator[str]:
    if port.affinity_seconds is not None:
        recent = f"-m recent --rcheck --seconds {port.affinity_seconds} --reap --name"
        mask = f"--mask {_AFFINITY_MASK[options.ipv6]} --rsource"
        for choice in choices:
            yield f"{_comment(port, choice, options)}{recent} {choice.chain} {mask} -j {choice.chain}"


def _random_rules(port: ServicePort, choices: list[_Choice], options: RuleOptions) -> Iterator[str]:
    """Yield a rule for each choice, with its share of the endpoints not picked yet; the last one takes the rest."""
    left = sum(choice.weight for choice in choices)
    for choice in choices:
        share = ""
        if choice.weight < left:
            share = f"-m statistic --mode random --probability {probability(choice.weight, left)} "
        yield f"{_comment(port, choice, options)}{share}-j {choice.chain}"
        left -= choice.weight


def _comment(port: ServicePort, choice: _Choice, options: RuleOptions) -> str:
    return "" if options.large_cluster else f'-m comment --comment "{port.name} -> {choice.title}" '


def _groups(chain: str, choices: list[_Choice]) -> list[tuple[str, list[_Choice]]]:
    """Divide n choices into about sqrt(n) groups; powers of two keep the number of groups stable."""
    count = 1 << round(math.log2(len(choices)) / 2)
    members: dict[int, list[_Choice]] = {}
    for choice in choices:
        members.setdefault(zlib.crc32(choice.title.encode()) % count, []).append(choice)
    return [(names.branch_chain(f"{chain} {i} of {count}"), members[i]) for i in sorted(members)]


def endpoint_chains(
    port: ServicePort, endpoints: Iterable[tuple[str, ResolvedEndpoint]], options: RuleOptions
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the chain of each endpoint: masquerade its own packets (hairpin), then DNAT.

    `endpoints` are pairs of chain and endpoint.
    """
    comment = "" if options.large_cluster else f'-m comment --comment "{port.name}" '
    protocol, ipv6 = port.protocol.value.lower(), options.ipv6
    for chain, endpoint in endpoints:
        affinity = ""
        if port.affinity_seconds is not None:
            affinity = f"-m recent --set --name {chain} --mask {_AFFINITY_MASK[ipv6]} --rsource "
        address = endpoint.endpoint.address
        destination = f"[{printed(address)}]:{endpoint.port}" if ipv6 else endpoint.target
        yield (
            chain,
            (
                f"-s {host(address)} {comment}-j {names.MARK_MASQ}",
                f"-p {protocol} {comment}{affinity}-m {protocol} -j DNAT --to-destination {destination}",
            ),
        )
