"""Where a packet goes: through all tables that it meets on this node, in the kernel's order, to the end."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pykubeproxy.inspect.dump import Verdict
from pykubeproxy.inspect.packet import DNAT, SNAT, UNTRACKED, Host, Packet
from pykubeproxy.inspect.targets import End
from pykubeproxy.inspect.walking import Flows, Rules, Step, Walk, add
from pykubeproxy.objects import address_and_port
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# The tables that the kernel asks at each point, in its order (linux/netfilter_ipv4.h, NF_IP_PRI_*).
_PREROUTING = ("raw", "mangle", "nat")
_OUTPUT = ("raw", "mangle", "nat", "filter", "security")
_FORWARD = ("mangle", "filter", "security")
_INPUT = ("mangle", "filter", "security", "nat")
_POSTROUTING = ("mangle", "nat")
_REFUSALS = {End.DROP: Verdict.DROP, End.REJECT: Verdict.REJECT}


class Chosen(msgspec.Struct, frozen=True):
    """An endpoint that the packet may get to, with which probability, and whether it is masqueraded on the way."""

    address: str
    port: int
    probability: float
    masquerade: bool


class Refusal(msgspec.Struct, frozen=True):
    """The packet is dropped or rejected, with which probability, and by which step."""

    verdict: Verdict
    probability: float
    step: Step


class Trace(msgspec.Struct, frozen=True):
    """What becomes of a packet.

    - `packet`: as it was given, with the interface it comes in by, where that could be told
    - `verdict`: DNAT if it may get to an endpoint, whatever else may happen; else the most probable
    - `masquerade`: its source is replaced, whichever endpoint it gets to
    - `endpoints`: in the order of the rules; their probabilities and those of the refusals add up to 1 under DNAT
    """

    packet: Packet
    verdict: Verdict
    masquerade: bool
    endpoints: tuple[Chosen, ...]
    refusals: tuple[Refusal, ...]
    steps: tuple[Step, ...]


def walk(ruleset: Ruleset, packet: Packet, host: Host) -> Trace:
    """Walk the first packet of a connection through the rules of a host; the chains of the kernel are among them.

    Every outcome is followed. What cannot be told from rules and packet alone is taken so: the client is new to
    session affinity; matches that are not known here do not match, and targets that are not let the packet on (each
    step says so); a masqueraded packet keeps its source in the rules it meets after that.
    """
    if not packet.starts_here and not packet.received_by:
        packet = _between(packet, host.interface_to(packet.source), "")
    journey = _Journey(ruleset, host)
    delivered = journey.run(packet)
    endpoints = _endpoints(delivered)
    return Trace(
        packet=packet,
        verdict=_verdict(delivered, journey.refusals),
        masquerade=bool(delivered) and all(SNAT in it.states for it in delivered),
        endpoints=endpoints,
        refusals=tuple(journey.refusals),
        steps=tuple(journey.steps),
    )


def _verdict(delivered: Flows, refusals: Iterable[Refusal]) -> Verdict:
    if any(DNAT in packet.states for packet in delivered):
        return Verdict.DNAT
    shares = {Verdict.PASS: sum(delivered.values())}
    for refusal in refusals:
        shares[refusal.verdict] = shares.get(refusal.verdict, 0.0) + refusal.probability
    return max(shares, key=lambda verdict: shares[verdict])


def _endpoints(delivered: Flows) -> tuple[Chosen, ...]:
    found: dict[tuple[str, int], list[tuple[float, bool]]] = {}
    for packet, share in delivered.items():
        if DNAT in packet.states:
            ways = found.setdefault((packet.destination, packet.port), [])
            ways.append((share, SNAT in packet.states))
    return tuple(
        Chosen(address, port, sum(share for share, _ in ways), all(masked for _, masked in ways))
        for (address, port), ways in found.items()
    )


class _Journey:
    """A packet's way across the host: what was met, and where it ended before its destination."""

    def __init__(self, ruleset: Ruleset, host: Host) -> None:
        self.steps: list[Step] = []
        self.refusals: list[Refusal] = []
        self._rules = Rules(ruleset)
        self._host = host

    def run(self, packet: Packet) -> Flows:
        """From where it enters; returns what gets to its destination, on this host or beyond."""
        if packet.starts_here:
            return self._from_here(msgspec.structs.replace(packet, sent_by=self._way_to(packet)))
        flows = self._point("PREROUTING", _PREROUTING, {packet: 1.0})
        local, others = self._routed(flows)
        local = self._point("INPUT", _INPUT, local)
        others = self._leave(self._point("FORWARD", _FORWARD, others))
        return local | others

    def _from_here(self, packet: Packet) -> Flows:
        """A packet of the host's own; one to itself comes in again by lo, where nothing is translated twice."""
        local, others = self._routed(self._leave(self._point("OUTPUT", _OUTPUT, {packet: 1.0})))
        local = {_between(it, "lo", ""): share for it, share in local.items()}
        local = self._point("PREROUTING", ("raw", "mangle"), local)
        return self._point("INPUT", ("mangle", "filter", "security"), local) | others

    def _leave(self, flows: Flows) -> Flows:
        out = {_between(it, it.received_by, self._way_to(it)): share for it, share in flows.items()}
        return self._point("POSTROUTING", _POSTROUTING, out)

    def _way_to(self, packet: Packet) -> str:
        return self._host.interface_to(packet.destination)

    def _routed(self, flows: Flows) -> tuple[Flows, Flows]:
        """Those that are for the host itself, and the others, with the interface they go out by."""
        local: Flows = {}
        others: Flows = {}
        for packet, share in flows.items():
            if self._host.is_local(packet.destination):
                local[packet] = share
            else:
                others[_between(packet, packet.received_by, self._way_to(packet))] = share
        return local, others

    def _point(self, chain: str, tables: Iterable[str], flows: Flows) -> Flows:
        for table in tables:
            key = ChainKey(table, chain)
            if key in self._rules:
                through: Flows = {}
                add(through, self._table(key, flows))
                flows = through
        return flows

    def _table(self, key: ChainKey, flows: Flows) -> Iterator[tuple[Packet, float]]:
        """Through one table; an untracked connection passes nat by."""
        walks: list[tuple[Packet, Walk]] = []
        for packet, share in flows.items():
            if key.table == "nat" and UNTRACKED in packet.states:
                yield packet, share
                continue
            walked = Walk(self._rules, self._host, key, packet)
            walks.append((packet, walked))
            for left in walked.left:
                if left.end is End.ACCEPT:
                    yield left.packet, share * left.share
                else:
                    self._refused(left.end, share * left.share, left.step)
        self.steps += _told(walks)

    def _refused(self, end: End, share: float, step: Step | None) -> None:
        assert step is not None, "only a step ends a packet's way"
        verdict = _REFUSALS[end]
        for position, known in enumerate(self.refusals):
            if (known.verdict, known.step) == (verdict, step):
                self.refusals[position] = Refusal(verdict, known.probability + share, step)
                return
        self.refusals.append(Refusal(verdict, share, step))


def _told(walks: Iterable[tuple[Packet, Walk]]) -> Iterator[Step]:
    """The steps of packets that go through a table one instead of the other; what all of them meet is told once."""
    groups: dict[tuple[Step, ...], list[Packet]] = {}
    for packet, walked in walks:
        groups.setdefault(tuple(walked.steps), []).append(packet)
    common = set[Step]().union(*groups).intersection(*groups)
    for number, (steps, packets) in enumerate(groups.items()):
        who = _in_words(packets)
        for step in steps:
            if step not in common:
                yield msgspec.structs.replace(step, why=f"{who}: {step.why}")
            elif not number:
                yield step


def _in_words(packets: Sequence[Packet]) -> str:
    first = address_and_port(packets[0].destination, packets[0].port)
    others = len(packets) - 1
    return f"to {first}{f' and {others} more' if others else ''}"


def _between(packet: Packet, received_by: str, sent_by: str) -> Packet:
    """The packet at another point between the interfaces."""
    return msgspec.structs.replace(packet, received_by=received_by, sent_by=sent_by)
