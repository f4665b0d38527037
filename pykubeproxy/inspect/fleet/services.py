"""Say of each Service what packets get instead of what they should get, in words that hold for many nodes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.meaning.clients import Chances, differing_groups
from pykubeproxy.inspect.meaning.model import Destination, MeaningChange, Outcome
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.trace.packet import Host
from pykubeproxy.objects import Key, address_and_port
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.wording import counted, listed

# How many endpoints or destinations a sentence names.
_LISTED = 5
_VERDICTS = {
    PacketVerdict.DROP: "dropped",
    PacketVerdict.REJECT: "rejected",
    PacketVerdict.PASS: "not redirected",
}


class Difference(NamedTuple):
    """What is different at a port, "" if it has no name: endpoints, and the addresses that clients connect to."""

    port: str
    text: str


class WrongService(msgspec.Struct, frozen=True, order=True):
    """A Service whose rules on a node do not follow the objects."""

    namespace: str
    name: str
    differences: tuple[Difference, ...]

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)


def wrong_services(
    changes: Iterable[MeaningChange], cluster: Cluster, host: Host
) -> tuple[WrongService, ...]:
    """Return the Services of these changes, sorted; one without a known name has the name "?"."""
    by_title: dict[str, list[MeaningChange]] = {}
    titles = _Titles(cluster)
    for change in changes:
        by_title.setdefault(titles.of(change), []).append(change)
    found: dict[Key, list[Difference]] = {}
    for title, some in sorted(by_title.items()):
        namespace, _, name = title.partition("/")
        service, _, port = name.partition(":")
        differences = (Difference(port, it) for it in _sentences(some, host))
        found.setdefault(Key(namespace, service), []).extend(differences)
    return tuple(WrongService(*key, tuple(differences)) for key, differences in sorted(found.items()))


class _Titles:
    """The names of service ports by cluster IP: comments in rules may be of a Service that had the address before."""

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


def _sentences(changes: Sequence[MeaningChange], host: Host) -> Iterator[str]:
    """Yield what is different, and where if it is not the same everywhere."""
    found: dict[str, dict[str, set[bool]]] = {}
    for change in changes:
        at = _destination(change.destination, host)
        for sentence in dict.fromkeys(_differences(change)):
            found.setdefault(sentence, {}).setdefault(at, set()).add(change.origin.on_node)
    for sentence, places in found.items():
        origins = set[bool]().union(*places.values())
        where = f" at {listed(places, _LISTED)}"
        if len(origins) == 1:
            where += " from the node" if origins == {True} else " from elsewhere"
        yield f"{sentence}{where}"


def _destination(destination: Destination, host: Host) -> str:
    protocol = "" if destination.protocol == "TCP" else f" {destination.protocol}"
    if host.is_local(destination.address):
        return f"node port {destination.port}{protocol}"
    return f"{address_and_port(destination.address, destination.port)}{protocol}"


def _differences(change: MeaningChange) -> Iterator[str]:
    before, after = _endpoints(change.before), _endpoints(change.after)
    if after and not before:
        yield f"{_verdict(change.before)} instead of reaching {counted(len(after), 'endpoint')}"
    elif before and not after:
        yield f"reaches {counted(len(before), 'endpoint')} instead of being {_verdict(change.after)}"
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
    """Yield the differences between outcomes with the same endpoints, for one group of clients."""
    if not any(it.endpoint for it in after):
        yield f"{_verdict(before)} instead of {_verdict(after)}"
    elif not any(it.endpoint for it in before):
        yield f"some clients {_verdict(before)} instead of served"
    elif {it.verdict for it in before} != {it.verdict for it in after}:
        yield "other clients dropped or rejected"
    elif (some := {it.masquerade for it in before}) != (others := {it.masquerade for it in after}):
        if len(some) == len(others) == 1:
            yield "not masqueraded" if others == {True} else "masqueraded, but should not be"
        else:
            yield "masqueraded for other endpoints"
    elif {it.affinity for it in before} != {it.affinity for it in after}:
        yield "other session affinity"
    elif {it.accepted for it in before} != {it.accepted for it in after}:
        yield (
            "not accepted in chain FORWARD"
            if any(it.accepted for it in after)
            else "accepted in chain FORWARD"
        )
    else:
        yield "other shares of endpoints"


def _endpoints(outcomes: Mapping[Outcome, object]) -> frozenset[str]:
    return frozenset(it.endpoint for it in outcomes if it.endpoint)


def _verdict(outcomes: Mapping[Outcome, object]) -> str:
    verdicts = {it.verdict for it in outcomes}
    return " or ".join(sorted(_VERDICTS.get(it, "served") for it in verdicts)) or "lost"
