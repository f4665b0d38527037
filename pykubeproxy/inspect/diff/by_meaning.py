"""Differences by meaning: what packets to Services get instead of what they should get.

A sentence holds for many nodes; the differences for clients are those of one node.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from pykubeproxy.inspect.diff.report import (
    VERDICTS,
    ClientDifference,
    ClientOutcome,
    Contested,
    KeptAffinity,
    MeaningDifference,
    WrongService,
    destination_title,
)
from pykubeproxy.inspect.meaning.outcomes import (
    Chances,
    ClientGroup,
    Destination,
    MeaningChange,
    PacketOutcome,
    differing_groups,
    endpoints_of,
    everyone,
)
from pykubeproxy.inspect.packets.addresses import Addresses, every_address, render_range, subtract, union
from pykubeproxy.inspect.packets.packet import NodeNetwork
from pykubeproxy.objects import Family, Key, family_of
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.wording import counted, listed

# How many endpoints or destinations a sentence names, and how many ranges of clients.
_LISTED, _CLIENTS = 5, 3


class PortTitle(NamedTuple):
    """A Service, and the name of one of its ports or ""."""

    service: Key
    port: str


def contested_destinations(cluster: Cluster) -> Mapping[Destination, Contested]:
    """Return the addresses that several Services have: cluster IPs, external IPs and load balancer IPs."""
    owners: dict[Destination, dict[str, None]] = {}
    for service in cluster.services():
        addresses = (*service.cluster_ips, *service.external_ips, *service.load_balancer_ips)
        for port, address in product(service.ports, addresses):
            destination = Destination(port.protocol.value, address, port.port)
            owners.setdefault(destination, {})[str(service.key)] = None
    return {
        destination: Contested(destination_title(*destination), tuple(sorted(services)))
        for destination, services in owners.items()
        if len(services) > 1
    }


def titled(changes: Iterable[MeaningChange], cluster: Cluster) -> Iterator[tuple[PortTitle, MeaningChange]]:
    """Yield changes with the service ports they belong to; one without a known name has the name "?"."""
    # Comments in rules may name a Service that had the address before.
    titles: dict[Destination, str] = {}
    for change in changes:
        titles = titles or dict(_cluster_ips(cluster))
        title = titles.get(change.destination) or change.title or "?"
        namespace, _, name = title.partition("/")
        service, _, port = name.partition(":")
        yield PortTitle(Key(namespace, service), port), change


def wrong_services(
    changes: Mapping[PortTitle, Sequence[MeaningChange]], host: NodeNetwork
) -> tuple[WrongService, ...]:
    """Return the Services of these changes, sorted."""
    found: dict[Key, list[MeaningDifference]] = {}
    for title, some in sorted(changes.items()):
        found.setdefault(title.service, []).extend(_port_differences(title.port, some, host))
    return tuple(WrongService(*key, tuple(differences)) for key, differences in sorted(found.items()))


def _cluster_ips(cluster: Cluster) -> Iterator[tuple[Destination, str]]:
    for service in cluster.services():
        for port in service.ports:
            title = f"{service.key}:{port.name}" if port.name else str(service.key)
            for address in service.cluster_ips:
                yield Destination(port.protocol.value, address, port.port), title


def _port_differences(
    port: str, changes: Sequence[MeaningChange], host: NodeNetwork
) -> Iterator[MeaningDifference]:
    found: dict[str, dict[str, set[bool]]] = {}
    for change in changes:
        at = _destination(change.destination, host)
        for text in _differences(change):
            found.setdefault(text, {}).setdefault(at, set()).add(change.origin.on_node)
    for text, places in found.items():
        origins = set[bool]().union(*places.values())
        origin = "" if len(origins) > 1 else "the node" if True in origins else "elsewhere"
        yield MeaningDifference(port, tuple(places), origin, text)


def _destination(destination: Destination, host: NodeNetwork) -> str:
    if host.is_local(destination.address):
        return f"node port {destination.port}{_protocol(destination)}"
    return destination_title(*destination)


def _protocol(destination: Destination) -> str:
    return "" if destination.protocol == "TCP" else f" {destination.protocol}"


def _differences(change: MeaningChange) -> Iterator[str]:
    before, after = _endpoints(change.before), _endpoints(change.after)
    if after and not before:
        yield f"{_verdict(change.before)}, should reach {counted(len(after), 'endpoint')}"
    elif before and not after:
        yield f"reach {counted(len(before), 'endpoint')}, should be {_verdict(change.after)}"
    elif before != after:
        if missing := sorted(after - before):
            yield f"{counted(len(missing), 'endpoint')} missing: {listed(missing, _LISTED)}"
        if gone := sorted(before - after):
            yield f"{counted(len(gone), 'endpoint')} too many: {listed(gone, _LISTED)}"
    else:
        yield from dict.fromkeys(
            sentence for group in differing_groups(change) for sentence in _other(group.before, group.after)
        )


def _other(before: Chances, after: Chances) -> Iterator[str]:
    """Yield what differs for one group of clients, apart from the endpoints."""
    if not any(outcome.endpoint for outcome in after):
        yield f"{_verdict(before)}, should be {_verdict(after)}"
    elif not any(outcome.endpoint for outcome in before):
        yield f"some clients {_verdict(before)}, should be served"
    elif {outcome.verdict for outcome in before} != {outcome.verdict for outcome in after}:
        yield "other shares of connections dropped or rejected"
    elif (some := {outcome.masquerade for outcome in before}) != (
        others := {outcome.masquerade for outcome in after}
    ):
        if len(some) == len(others) == 1:
            yield "not masqueraded, should be" if others == {True} else "masqueraded, should not be"
        else:
            yield "masqueraded on the way to other endpoints"
    elif {outcome.affinity for outcome in before} != {outcome.affinity for outcome in after}:
        yield "other session affinity"
    elif {outcome.accepted for outcome in before} != {outcome.accepted for outcome in after}:
        yield (
            "not accepted in chain FORWARD"
            if any(outcome.accepted for outcome in after)
            else "accepted in chain FORWARD"
        )
    else:
        yield "endpoints get other shares of connections"


def _endpoints(outcomes: Mapping[PacketOutcome, object]) -> frozenset[str]:
    return frozenset(outcome.endpoint for outcome in outcomes if outcome.endpoint)


def _verdict(outcomes: Mapping[PacketOutcome, object]) -> str:
    verdicts = {outcome.verdict for outcome in outcomes}
    return " or ".join(sorted(VERDICTS.get(verdict, "served") for verdict in verdicts)) or "lost"


def client_differences(changes: Iterable[MeaningChange]) -> tuple[ClientDifference, ...]:
    """Return what each group of clients gets instead."""
    return tuple(
        _client_difference(change, group) for change in changes for group in differing_groups(change)
    )


def _client_difference(change: MeaningChange, group: ClientGroup) -> ClientDifference:
    to = change.destination
    return ClientDifference(
        service=change.title or None,
        protocol=to.protocol,
        address=to.address,
        port=to.port,
        origin="node" if change.origin.on_node else "elsewhere",
        interface=change.origin.interface,
        clients=tuple(render_range(family_of(to.address), client) for client in group.clients),
        title=_named(change, group),
        endpoints_only=group.endpoints_only,
        before=_outcomes(group.before),
        after=_outcomes(group.after),
    )


def _outcomes(chances: Chances) -> tuple[ClientOutcome, ...]:
    found = (
        ClientOutcome(
            outcome.verdict,
            outcome.endpoint or None,
            share,
            outcome.masquerade,
            outcome.accepted,
            tuple(KeptAffinity(*kept) for kept in outcome.affinity),
        )
        for outcome, share in chances.items()
    )
    return tuple(sorted(found, key=lambda outcome: (outcome.endpoint or "", outcome.verdict.value)))


def _named(change: MeaningChange, group: ClientGroup) -> str:
    """Name a group by its origin, or by networks; addresses that send nothing from there do not count."""
    if change.origin.on_node:
        return "this node"
    family = family_of(change.destination.address)
    senders = everyone(change)
    ignored = subtract(every_address(family), senders)
    if not group.endpoints_only:
        ignored = union((ignored, endpoints_of(change)))
    others = _filled(subtract(senders, union((group.clients, ignored))), ignored)
    elsewhere = f"interface {change.origin.interface}" if change.origin.interface else "elsewhere"
    if not others:
        return elsewhere
    among = _filled(group.clients, ignored)
    if len(others) < len(among):
        return f"{elsewhere} except {_ranges(family, others)}"
    return _ranges(family, among)


def _filled(addresses: Addresses, ignored: Addresses) -> Addresses:
    """Add the ignored ranges between two ranges of addresses."""
    first, last = {range_.first for range_ in addresses}, {range_.last for range_ in addresses}
    return union(
        (
            addresses,
            tuple(range_ for range_ in ignored if range_.first - 1 in last and range_.last + 1 in first),
        )
    )


def _ranges(family: Family, addresses: Addresses) -> str:
    return listed((render_range(family, range_) for range_ in addresses), _CLIENTS)
