"""Say of each Service what packets get instead of what they should get, in words that hold for many nodes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.meaning.clients import Chances, differing_groups
from pykubeproxy.inspect.meaning.outcomes import Destination, MeaningChange, Outcome
from pykubeproxy.inspect.meaning.render import VERDICTS
from pykubeproxy.inspect.trace.packet import Host
from pykubeproxy.objects import Key, address_and_port
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.wording import counted, listed

# How many endpoints or destinations a sentence names.
_LISTED = 5


class Difference(NamedTuple):
    """What clients of a port get instead of what they should get.

    - `port`: its name, "" without one
    - `at`: where clients connect to: "ip:port" or "node port 30080"
    - `origin`: which clients: "the node", "elsewhere", or "" for both
    - `text`: such as "1 endpoint missing: 10.244.1.5:8080"
    """

    port: str
    at: tuple[str, ...]
    origin: str
    text: str


class PortTitle(NamedTuple):
    """A Service, and the name of one of its ports or ""."""

    service: Key
    port: str


class WrongService(msgspec.Struct, frozen=True, order=True):
    """A Service whose rules on a node do not follow the objects."""

    namespace: str
    name: str
    differences: tuple[Difference, ...]

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)


class Contested(NamedTuple):
    """An address and port that several Services have. kube-proxy sends packets to any one of them."""

    at: str
    services: tuple[str, ...]


def contested_destinations(cluster: Cluster) -> Mapping[Destination, Contested]:
    """Return the addresses that several Services have: cluster IPs, external IPs and load balancer IPs."""
    owners: dict[Destination, dict[str, None]] = {}
    for service in cluster.services():
        addresses = (*service.cluster_ips, *service.external_ips, *service.load_balancer_ips)
        for port, address in product(service.ports, addresses):
            destination = Destination(port.protocol.value, address, port.port)
            owners.setdefault(destination, {})[str(service.key)] = None
    return {
        it: Contested(_title(it), tuple(sorted(services)))
        for it, services in owners.items()
        if len(services) > 1
    }


def titled(changes: Iterable[MeaningChange], cluster: Cluster) -> Iterator[tuple[PortTitle, MeaningChange]]:
    """Yield changes with the service ports they belong to; one without a known name has the name "?"."""
    titles = _Titles(cluster)
    for change in changes:
        namespace, _, name = titles.of(change).partition("/")
        service, _, port = name.partition(":")
        yield PortTitle(Key(namespace, service), port), change


def wrong_services(
    changes: Mapping[PortTitle, Sequence[MeaningChange]], host: Host
) -> tuple[WrongService, ...]:
    """Return the Services of these changes, sorted."""
    found: dict[Key, list[Difference]] = {}
    for title, some in sorted(changes.items()):
        found.setdefault(title.service, []).extend(_port_differences(title.port, some, host))
    return tuple(WrongService(*key, tuple(differences)) for key, differences in sorted(found.items()))


class _Titles:
    """The service port of each cluster IP. Comments in rules may name a Service that had the address before."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[Destination, str] | None = None

    def of(self, change: MeaningChange) -> str:
        if self._known is None:
            self._known = dict(_cluster_ips(self._cluster))
        return self._known.get(change.destination) or change.title or "?"


def _cluster_ips(cluster: Cluster) -> Iterator[tuple[Destination, str]]:
    for service in cluster.services():
        for port in service.ports:
            title = f"{service.key}:{port.name}" if port.name else str(service.key)
            for address in service.cluster_ips:
                yield Destination(port.protocol.value, address, port.port), title


def _port_differences(port: str, changes: Sequence[MeaningChange], host: Host) -> Iterator[Difference]:
    found: dict[str, dict[str, set[bool]]] = {}
    for change in changes:
        at = _destination(change.destination, host)
        for text in _differences(change):
            found.setdefault(text, {}).setdefault(at, set()).add(change.origin.on_node)
    for text, places in found.items():
        origins = set[bool]().union(*places.values())
        origin = "" if len(origins) > 1 else "the node" if True in origins else "elsewhere"
        yield Difference(port, tuple(places), origin, text)


def _destination(destination: Destination, host: Host) -> str:
    if host.is_local(destination.address):
        return f"node port {destination.port}{_protocol(destination)}"
    return _title(destination)


def _title(destination: Destination) -> str:
    return f"{address_and_port(destination.address, destination.port)}{_protocol(destination)}"


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
    if not any(it.endpoint for it in after):
        yield f"{_verdict(before)}, should be {_verdict(after)}"
    elif not any(it.endpoint for it in before):
        yield f"some clients {_verdict(before)}, should be served"
    elif {it.verdict for it in before} != {it.verdict for it in after}:
        yield "other shares of connections dropped or rejected"
    elif (some := {it.masquerade for it in before}) != (others := {it.masquerade for it in after}):
        if len(some) == len(others) == 1:
            yield "not masqueraded, should be" if others == {True} else "masqueraded, should not be"
        else:
            yield "masqueraded on the way to other endpoints"
    elif {it.affinity for it in before} != {it.affinity for it in after}:
        yield "other session affinity"
    elif {it.accepted for it in before} != {it.accepted for it in after}:
        yield (
            "not accepted in chain FORWARD"
            if any(it.accepted for it in after)
            else "accepted in chain FORWARD"
        )
    else:
        yield "endpoints get other shares of connections"


def _endpoints(outcomes: Mapping[Outcome, object]) -> frozenset[str]:
    return frozenset(it.endpoint for it in outcomes if it.endpoint)


def _verdict(outcomes: Mapping[Outcome, object]) -> str:
    verdicts = {it.verdict for it in outcomes}
    return " or ".join(sorted(VERDICTS.get(it, "served") for it in verdicts)) or "lost"
