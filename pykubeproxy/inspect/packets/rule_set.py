"""What a walk asks of the rules of a node, whatever program wrote them: base chains at hooks, and rules in chains."""

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.rules.ruleset import ChainKey

# Starts the reason of a step that trace cannot evaluate.
NOT_KNOWN = "trace does not know"
# Starts the reason of a step that depends on an interface which is not known. Only lo is known not to be the one.
NO_INTERFACE = "trace does not know the interface"
# The reason of a rule without conditions.
EVERY_PACKET = "every packet matches"


class Hook(enum.Enum):
    """A point on the way of packets through the kernel."""

    PREROUTING = "PREROUTING"
    INPUT = "INPUT"
    FORWARD = "FORWARD"
    OUTPUT = "OUTPUT"
    POSTROUTING = "POSTROUTING"


# Where chains that translate addresses stand at each hook, whatever priority they name (linux/netfilter_ipv4.h).
_TRANSLATION = {Hook.PREROUTING: -100, Hook.OUTPUT: -100, Hook.INPUT: 100, Hook.POSTROUTING: 100}


class BaseChain(NamedTuple):
    """A chain that packets enter at a hook, those of a lower priority first.

    - `translates`: only the first packet of a tracked connection enters, and that only once at a kind of hook
    - `drops`: packets that no rule decides on are dropped
    """

    key: ChainKey
    priority: int
    translates: bool
    drops: bool

    def order(self, hook: Hook) -> tuple[int, int]:
        """Return a key by which the base chains at a hook are in the kernel's order."""
        place = _TRANSLATION.get(hook, self.priority) if self.translates else self.priority
        return place, self.priority


class RuleEnd(enum.Enum):
    """How a packet leaves a chain by a rule. RETURN continues behind the jump to the chain."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"
    RETURN = "RETURN"


class RuleEffect(msgspec.Struct, frozen=True):
    """What a rule does to a packet that matches it: without an end or a jump, it continues with the next rule.

    - `packet`: after the rule
    - `jump`: the chain where it continues, from which it does not return here after a `goto`; or an unknown target
    - `remark`: may be ""
    """

    packet: Packet
    end: RuleEnd | None = None
    jump: str = ""
    goto: bool = False
    remark: str = ""


# Parts of the packets that get to a rule, each with its probability.
Parts = tuple[tuple[Packet, float], ...]


class Split(NamedTuple):
    """How a rule divides packets: by chance, and by client if there are many.

    - `matched`: what it does to each part that matches, with the probability of the part
    - `failed`: the position of the condition that no packet meets
    - `error`: why the rule cannot be evaluated for a part, which is among the missed ones then
    """

    matched: tuple[tuple[RuleEffect, float], ...]
    missed: Parts = ()
    failed: int = -1
    error: str = ""


class PacketRule(Protocol):
    """A rule.

    - `text`: what its program prints, without the name of the chain
    - `comment`: may be ""
    - `affinity`: for how many seconds the rule sends a client to its endpoint again; 0 for other rules
    """

    @property
    def text(self) -> str: ...

    @property
    def comment(self) -> str: ...

    @property
    def affinity(self) -> int: ...

    def split(self, packet: Packet, network: NodeNetwork) -> Split:
        """Divide packets into those that match, with what happens to them, and the others."""

    def reason(self, packet: Packet, network: NodeNetwork, split: Split) -> str:
        """Return why packets match, or why not; "" if the rule is for another destination, protocol or port."""


class RuleSet(Protocol):
    """The rules of one family that one program wrote."""

    def base_chains(self, hook: Hook) -> Sequence[BaseChain]:
        """Return the chains that packets enter at a hook."""

    def met(self, chain: ChainKey, packet: Packet, /) -> Sequence[PacketRule]:
        """Return the rules of a chain that a packet can match, in order; none if the chain is missing."""

    def jump(self, chain: ChainKey, target: str) -> ChainKey | None:
        """Return the chain to which a rule of this chain with a target jumps; None if the target is no chain."""
