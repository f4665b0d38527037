"""Trace a packet through all tables it passes on this node, in the kernel's order."""

from collections.abc import Iterable, Iterator

import msgspec

from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.inspect.trace.chains import Chains
from pykubeproxy.inspect.trace.packet import DNAT, SNAT, UNTRACKED, Host, Packet
from pykubeproxy.inspect.trace.walk import End, Flows, Passage, Path, Step, Walk, add
from pykubeproxy.objects import address_and_port
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

# The tables at each hook, in the kernel's order (linux/netfilter_ipv4.h, NF_IP_PRI_*).
_PREROUTING = ("raw", "mangle", "nat")
_OUTPUT = ("raw", "mangle", "nat", "filter", "security")
_FORWARD = ("mangle", "filter", "security")
_INPUT = ("mangle", "filter", "security", "nat")
_POSTROUTING = ("mangle", "nat")
# A trace to 40,000 endpoints visits fewer: each has some rules, and some steps on which to meet them.
_MOST_RULES, _LEAST_RULES, _TIMES = 50_000_000, 5_000_000, 1000
_REJECTIONS = {End.DROP: PacketVerdict.DROP, End.REJECT: PacketVerdict.REJECT}


class TracedEndpoint(msgspec.Struct, frozen=True):
    """An endpoint that the packet may reach, and whether it is masqueraded on the way."""

    address: str
    port: int
    probability: float
    masquerade: bool


class Rejection(msgspec.Struct, frozen=True):
    """A step that drops or rejects the packet."""

    verdict: PacketVerdict
    probability: float
    step: Step


class Outcome(msgspec.Struct, frozen=True):
    """One thing that may happen to the packet: the packet at its end, how probable that is, and its path."""

    verdict: PacketVerdict
    packet: Packet
    probability: float
    path: Path


class Trace(msgspec.Struct, frozen=True):
    """What happens to a packet.

    - `packet`: the packet, with the interface it comes in by, if known
    - `verdict`: DNAT if it may reach an endpoint; else the most probable one
    - `masquerade`: its source is replaced, whichever endpoint it reaches
    - `endpoints`: in the order of the rules; under DNAT their probabilities and those of the rejections add up to 1
    - `outcomes`: all that may happen; their probabilities add up to 1
    """

    packet: Packet
    verdict: PacketVerdict
    masquerade: bool
    endpoints: tuple[TracedEndpoint, ...]
    rejections: tuple[Rejection, ...]
    steps: tuple[Step, ...]
    outcomes: tuple[Outcome, ...]


def trace_packet(ruleset: Ruleset, packet: Packet, host: Host) -> Trace:
    """Trace the first packet of a connection through a host's rules, built-in chains included.

    Follow every outcome. Assume that the client is new to session affinity, that unknown matches do not match, that
    unknown targets let the packet continue (the step says so), and that a masqueraded packet keeps its source.
    """
    if not packet.starts_here and not packet.received_by:
        packet = msgspec.structs.replace(packet, received_by=host.interface_to(packet.source))
    path = _Path(Chains(ruleset), host)
    delivered = path.run(packet)
    rejections = tuple(Rejection(verdict, total, step) for (verdict, step), total in path.rejected.items())
    return Trace(
        packet=packet,
        verdict=_verdict(delivered, rejections),
        masquerade=bool(delivered) and all(SNAT in one.states for one in delivered),
        endpoints=_endpoints(delivered),
        rejections=rejections,
        steps=tuple(path.steps),
        outcomes=(*path.outcomes(delivered), *path.ended),
    )


def _verdict(delivered: Flows, rejections: Iterable[Rejection]) -> PacketVerdict:
    if any(DNAT in packet.states for packet in delivered):
        return PacketVerdict.DNAT
    totals = {PacketVerdict.PASS: sum(passage.probability for passage in delivered.values())}
    for rejection in rejections:
        totals[rejection.verdict] = totals.get(rejection.verdict, 0.0) + rejection.probability
    return max(totals, key=lambda verdict: totals[verdict])


def _endpoints(delivered: Flows) -> tuple[TracedEndpoint, ...]:
    found: dict[tuple[str, int], dict[Packet, float]] = {}
    for packet, passage in delivered.items():
        if DNAT in packet.states:
            found.setdefault((packet.destination, packet.port), {})[packet] = passage.probability
    return tuple(
        TracedEndpoint(address, port, sum(some.values()), all(SNAT in packet.states for packet in some))
        for (address, port), some in found.items()
    )


class _Path:
    """A packet's path across the host: the steps, and where packets ended early."""

    def __init__(self, chains: Chains, host: Host) -> None:
        self.steps: list[Step] = []
        self.rejected: dict[tuple[PacketVerdict, Step], float] = {}
        self.ended: list[Outcome] = []
        self._chains = chains
        self._host = host
        self._limit = RuleLimit(_MOST_RULES, _LEAST_RULES, _TIMES)

    def run(self, packet: Packet) -> Flows:
        """Return the packets that reach a destination, on this host or beyond."""
        if packet.starts_here:
            return self._from_here(self._to_send(packet))
        flows = self._hook("PREROUTING", _PREROUTING, {packet: Passage(1.0)})
        local, others = self._routed(flows)
        local = self._hook("INPUT", _INPUT, local)
        others = self._leave(self._hook("FORWARD", _FORWARD, others))
        return local | others

    def outcomes(self, delivered: Flows) -> Iterator[Outcome]:
        """Yield the outcomes in which a packet reaches a destination."""
        for packet, passage in delivered.items():
            yield self._outcome(
                PacketVerdict.DNAT if DNAT in packet.states else PacketVerdict.PASS, packet, passage
            )

    def _outcome(self, verdict: PacketVerdict, packet: Packet, passage: Passage) -> Outcome:
        self._limit.count(passage.points)
        return Outcome(verdict, packet, passage.probability, passage.path)

    def _from_here(self, packet: Packet) -> Flows:
        """Trace a packet of the host itself; one to the host comes in again by lo, without a second translation."""
        local, others = self._routed(self._leave(self._hook("OUTPUT", _OUTPUT, {packet: Passage(1.0)})))
        local = {
            msgspec.structs.replace(one, received_by="lo", sent_by=""): passage
            for one, passage in local.items()
        }
        local = self._hook("PREROUTING", ("raw", "mangle"), local)
        return self._hook("INPUT", ("mangle", "filter", "security"), local) | others

    def _leave(self, flows: Flows) -> Flows:
        out = {self._to_send(packet): passage for packet, passage in flows.items()}
        return self._hook("POSTROUTING", _POSTROUTING, out)

    def _to_send(self, packet: Packet) -> Packet:
        return msgspec.structs.replace(packet, sent_by=self._host.interface_to(packet.destination))

    def _routed(self, flows: Flows) -> tuple[Flows, Flows]:
        """Split packets into those to the host itself, and the others, with their outgoing interface."""
        local: Flows = {}
        others: Flows = {}
        for packet, passage in flows.items():
            if self._host.is_local(packet.destination):
                local[packet] = passage
            else:
                others[self._to_send(packet)] = passage
        return local, others

    def _hook(self, chain: str, tables: Iterable[str], flows: Flows) -> Flows:
        for table in tables:
            key = ChainKey(table, chain)
            if key in self._chains:
                through: Flows = {}
                add(through, self._table(key, flows))
                flows = through
        return flows

    def _table(self, key: ChainKey, flows: Flows) -> Iterator[tuple[Packet, Passage]]:
        """Yield the packets that one table lets pass; untracked connections skip nat."""
        walks: list[tuple[Packet, Walk]] = []
        for packet, passage in flows.items():
            if key.table == "nat" and UNTRACKED in packet.states:
                yield packet, passage
                continue
            walk = Walk(self._chains, self._host, key, packet, passage, self._limit)
            walks.append((packet, walk))
            for left in walk.exits:
                if left.end is End.ACCEPT:
                    yield left.packet, left.passage
                else:
                    verdict, probability = _REJECTIONS[left.end], left.passage.probability
                    known = (verdict, left.step)
                    self.rejected[known] = self.rejected.get(known, 0.0) + probability
                    self.ended.append(self._outcome(verdict, left.packet, left.passage))
        self.steps += _merged(walks)


def _merged(walks: Iterable[tuple[Packet, Walk]]) -> Iterator[Step]:
    """Yield the steps of alternative packets through one table; steps common to all come once."""
    groups: dict[tuple[Step, ...], list[Packet]] = {}
    for packet, walk in walks:
        groups.setdefault(tuple(walk.steps), []).append(packet)
    common = set[Step]().union(*groups).intersection(*groups)
    for number, (steps, packets) in enumerate(groups.items()):
        others = f" and {len(packets) - 1} more" if packets[1:] else ""
        destination = f"to {address_and_port(packets[0].destination, packets[0].port)}{others}"
        for step in steps:
            if step not in common:
                yield msgspec.structs.replace(step, reason=f"{destination}: {step.reason}")
            elif not number:
                yield step
