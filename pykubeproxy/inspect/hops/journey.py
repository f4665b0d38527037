"""The journey of a packet over nodes, as values."""

import enum
from collections.abc import Callable, Collection, Mapping

import msgspec

from pykubeproxy.inspect.hops.locations import Location
from pykubeproxy.inspect.node_tables import NodeTables
from pykubeproxy.inspect.trace.model import Trace
from pykubeproxy.inspect.trace.packet import Packet
from pykubeproxy.inspect.trace.walk import Step


class Unread(msgspec.Struct, frozen=True):
    """A node whose rules are unknown. `reason` says why, such as "runs kube-proxy in IPVS mode"."""

    reason: str


# Reads these nodes, side by side if it can. Names every node that it is asked for.
ReadNodes = Callable[[Collection[str]], Mapping[str, NodeTables | Unread]]


class Entry(msgspec.Struct, frozen=True):
    """A packet, and the node whose rules it meets first.

    - `from_pod`: it comes in from a pod of this node
    """

    node: str
    packet: Packet
    from_pod: bool = False


class Visit(msgspec.Struct, frozen=True):
    """A packet on one node.

    - `route`: the nodes before this one
    - `probability`: of getting here
    - `trace`: the packet in the rules of this node; None if they are unknown, and `unread` says why
    """

    node: str
    route: tuple[str, ...]
    packet: Packet
    probability: float
    trace: Trace | None
    unread: str = ""


class Result(enum.Enum):
    """How a packet ends.

    - REACHED: it gets to its destination, a pod or a node
    - LEFT: it leaves the cluster
    - SENT: it is on its way to a node whose rules are unknown
    - LOST: it goes to more nodes than a packet of a sound cluster does
    """

    REACHED = "reached"
    DROPPED = "dropped"
    REJECTED = "rejected"
    LEFT = "left"
    SENT = "sent"
    LOST = "lost"


class Outcome(msgspec.Struct, frozen=True):
    """One end of a packet.

    - `location`: of the destination that it has then, and `port`
    - `translated`: a rule has replaced the destination, usually by an endpoint
    - `by_proxy`: the last rule to do so is one of a service proxy
    - `client`: the source that its receiver sees; "" if it is an unknown address of the node `masqueraded_on`
    - `client_assumed`: the node may also have picked another of its addresses
    - `masqueraded_on`: the node that replaced its source last; "" if the source is kept
    - `route`: the nodes on its way, the last one where it ends
    - `step`: the rule that drops or rejects it
    """

    result: Result
    location: Location
    port: int
    translated: bool
    by_proxy: bool
    client: str
    client_assumed: bool
    masqueraded_on: str
    route: tuple[str, ...]
    probability: float
    step: Step | None = None


class Journey(msgspec.Struct, frozen=True):
    """A packet from the first node to all its ends, whose probabilities add up to 1. `visits` are in order of time."""

    entry: Entry
    visits: tuple[Visit, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def unread(self) -> Mapping[str, str]:
        """The nodes whose rules are unknown, with the reasons."""
        return {visit.node: visit.unread for visit in self.visits if visit.trace is None}

    @property
    def starts_unread(self) -> bool:
        """Whether the rules of the first node are unknown."""
        return self.visits[0].trace is None
