"""What packets get, as values: destinations, outcomes with their clients and probabilities, and changes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.meaning.addresses import Range
from pykubeproxy.inspect.meaning.walk import Arrival, Flow
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.trace.packet import DNAT, SNAT, Packet
from pykubeproxy.inspect.trace.walk import End
from pykubeproxy.objects import address_and_port

# Versions of kube-proxy give probabilities with 5 to 11 decimals; smaller differences are noise.
_NOISE = 2e-5


class Destination(NamedTuple):
    """An address and port that clients connect to; the protocol as Kubernetes writes it."""

    protocol: str
    address: str
    port: int


class Origin(NamedTuple):
    """Where packets start: on the node, or elsewhere, with the interface they come in by if a rule names it."""

    on_node: bool
    interface: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """What may happen to a packet.

    - `endpoint`: "ip:port" under DNAT
    - `masquerade`: the endpoint sees an address of the node
    - `accepted`: it reaches the endpoint even if the policy of FORWARD is DROP; None if that does not count
    - `affinity`: where a client's next connections go, and for how many seconds; usually the same endpoint
    """

    verdict: PacketVerdict
    endpoint: str = ""
    masquerade: bool = False
    accepted: bool | None = False
    affinity: tuple[tuple[str, int], ...] = ()


class Part(NamedTuple):
    """Clients with addresses from first to last get an outcome with this probability."""

    clients: Range
    probability: float


# What packets from one origin to one destination get; parts are sorted, without overlaps.
Meaning = Mapping[Outcome, tuple[Part, ...]]


class MeaningChange(msgspec.Struct, frozen=True):
    """Packets that get something else after than before."""

    title: str
    destination: Destination
    origin: Origin
    before: Meaning
    after: Meaning


def meaning_of(arrivals: Iterable[Arrival]) -> Meaning:
    """Return what the packets of a flow get, from where they have arrived."""
    arrived = list(arrivals)
    known: dict[str, set[tuple[str, int]]] = {}
    for flow in (it.flow for it in arrived):
        if flow.recalled:
            known.setdefault(flow.recalled.name, set()).add((_endpoint(flow.packet), flow.recalled.seconds))
    parts: dict[Outcome, list[Part]] = {}
    for flow, end in ((it.flow, it.end) for it in arrived if not it.flow.recalled):
        affinity = tuple(sorted(known.get(flow.remembered_in, ())))
        parts.setdefault(_outcome(flow, end, affinity), []).extend(
            Part(clients, flow.probability) for clients in flow.clients
        )
    return {outcome: tuple(_sums(some)) for outcome, some in parts.items()}


def same_meaning(before: Meaning, after: Meaning) -> bool:
    """Return whether clients get the same."""
    for outcome in before.keys() | after.keys():
        removed = (Part(clients, -probability) for clients, probability in before.get(outcome, ()))
        if any(_sums((*removed, *after.get(outcome, ())))):
            return False
    return True


def _outcome(flow: Flow, end: End, affinity: tuple[tuple[str, int], ...]) -> Outcome:
    if end is End.DROP:
        return Outcome(PacketVerdict.DROP)
    if end is End.REJECT:
        return Outcome(PacketVerdict.REJECT)
    endpoint = _endpoint(flow.packet)
    verdict = PacketVerdict.DNAT if endpoint else PacketVerdict.PASS
    return Outcome(verdict, endpoint, SNAT in flow.packet.states, flow.accepted, affinity)


def _endpoint(packet: Packet) -> str:
    return address_and_port(packet.destination, packet.port) if DNAT in packet.states else ""


def _sums(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts without overlaps, sorted, with the sum of the probabilities; leave out those of about 0."""
    steps: dict[int, float] = {}
    for clients, probability in parts:
        steps[clients.first] = steps.get(clients.first, 0.0) + probability
        steps[clients.last + 1] = steps.get(clients.last + 1, 0.0) - probability
    first, total = 0, 0.0
    for at in sorted(steps):
        if abs(steps[at]) < _NOISE:
            continue
        if abs(total) > _NOISE:
            yield Part(Range(first, at - 1), total)
        first, total = at, total + steps[at]
