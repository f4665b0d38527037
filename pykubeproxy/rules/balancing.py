"""The chains that pick a backend and the ones that send a packet there."""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pykubeproxy.config import Dispatch
from pykubeproxy.rules import names
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.text import host, printed, probability
from pykubeproxy.rules.tree import Tree
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import ServicePort

# Every bit of the client's address counts for affinity.
_AFFINITY_MASK = {False: "255.255.255.255", True: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}


# More backends than this are balanced in two steps: first a group is picked, then one of the group.
GROUPS_ABOVE = 128


def balance(port: ServicePort, chain: str, backends: Sequence[tuple[str, str]], options: RuleOptions) -> Tree:
    """The rules of `chain` that send each new connection to one of the backends, all with the same probability.

    `backends` are their chains, with what rules call them.

    A client with affinity goes where it was last time, as long as that was within `affinity_seconds`. Which group a
    backend belongs to is up to itself, so that one that comes or goes changes its own group and the shares of all.
    """
    targets = [_Target(endpoint, title, 1) for endpoint, title in backends]
    remembered = tuple(_remembered(port, targets, options))
    if options.dispatch is Dispatch.FLAT or len(backends) <= GROUPS_ABOVE:
        return Tree((*remembered, *_picked(port, targets, options)), ())
    groups = _grouped(chain, targets)
    heads = [_Target(name, f"{len(members)} endpoints", len(members)) for name, members in groups]
    return Tree(
        (*remembered, *_picked(port, heads, options)),
        tuple((name, tuple(_picked(port, members, options))) for name, members in groups),
    )


class _Target(NamedTuple):
    """A chain to pick, what its comment calls it, and how many backends are behind it."""

    chain: str
    title: str
    weight: int


def _remembered(port: ServicePort, targets: list[_Target], options: RuleOptions) -> Iterator[str]:
    if port.affinity_seconds is not None:
        known = f"-m recent --rcheck --seconds {port.affinity_seconds} --reap --name"
        mask = f"--mask {_AFFINITY_MASK[options.ipv6]} --rsource"
        for target in targets:
            yield f"{_remark(port, target, options)}{known} {target.chain} {mask} -j {target.chain}"


def _picked(port: ServicePort, targets: list[_Target], options: RuleOptions) -> Iterator[str]:
    """Each rule takes the share of its backends in those that are left, and the last one all that is left."""
    left = sum(target.weight for target in targets)
    for target in targets:
        share = ""
        if target.weight < left:
            share = f"-m statistic --mode random --probability {probability(target.weight, left)} "
        yield f"{_remark(port, target, options)}{share}-j {target.chain}"
        left -= target.weight


def _remark(port: ServicePort, target: _Target, options: RuleOptions) -> str:
    return "" if options.large_cluster else f'-m comment --comment "{port.name} -> {target.title}" '


def _grouped(chain: str, targets: list[_Target]) -> list[tuple[str, list[_Target]]]:
    """About as many groups as each has members, a power of two for the number to change seldom."""
    count = 1 << round(math.log2(len(targets)) / 2)
    members: dict[int, list[_Target]] = {}
    for target in targets:
        members.setdefault(zlib.crc32(target.title.encode()) % count, []).append(target)
    return [(names.branch_chain(f"{chain} {i} of {count}"), members[i]) for i in sorted(members)]


def endpoint_rules(
    port: ServicePort, backend: ResolvedEndpoint, chain: str, options: RuleOptions
) -> tuple[str, str]:
    """The rules of one backend's chain.

    A backend that reaches itself through the service is masqueraded, for it would take the answer to its own packet
    for a stranger's (hairpin). Everything else is sent on, and remembered if the service has affinity.
    """
    remark = "" if options.large_cluster else f'-m comment --comment "{port.name}" '
    remember = ""
    if port.affinity_seconds is not None:
        remember = f"-m recent --set --name {chain} --mask {_AFFINITY_MASK[options.ipv6]} --rsource "
    protocol = port.protocol.value.lower()
    address = printed(backend.endpoint.address)
    destination = f"[{address}]:{backend.port}" if options.ipv6 else backend.target
    return (
        f"-s {host(backend.endpoint.address)} {remark}-j {names.MARK_MASQ}",
        f"-p {protocol} {remark}{remember}-m {protocol} -j DNAT --to-destination {destination}",
    )
