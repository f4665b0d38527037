"""What `walk` asks a set of rules: of iptables, or of another program."""

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.rules.ruleset import ChainKey


class Hook(enum.Enum):
    """A point on the way of packets through the kernel."""

    PREROUTING = "PREROUTING"
    INPUT = "INPUT"
    FORWARD = "FORWARD"
    OUTPUT = "OUTPUT"
    POSTROUTING = "POSTROUTING"


class BaseChain(NamedTuple):
    """A chain that packets enter at a hook.

    - `translates`: only the first packet of a tracked connection enters, and that only once at a kind of hook
    - `drops`: packets that no rule decides on are dropped
    """

    key: ChainKey
    translates: bool
    drops: bool


class RuleEnd(enum.Enum):
    """How a packet leaves a chain by a rule. RETURN continues behind the jump to the chain."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"
    RETURN = "RETURN"


class RuleEffect(msgspec.Struct, frozen=True):
    """The packet after a rule; without an end it continues with the next rule. `remark` may be ""."""

    packet: Packet
    end: RuleEnd | None = None
    remark: str = ""


# Parts of the packets that get to a rule, each with its probability.
Parts = tuple[tuple[Packet, float], ...]


class Split(NamedTuple):
    """How a rule divides packets: by chance, and by client if there are many.

    - `failed`: the position of the condition that no packet meets
    - `error`: why the rule cannot be evaluated; then no packet matches
    """

    matched: Parts
    missed: Parts = ()
    failed: int = -1
    error: str = ""


class PacketRule(Protocol):
    """A rule. After a jump with `goto` packets do not return."""

    @property
    def text(self) -> str:
        """The rule as its program prints it."""

    @property
    def target(self) -> str:
        """The chain to which it jumps, or what it does; "" if it only counts packets."""

    @property
    def goto(self) -> bool: ...

    def split(self, packet: Packet, network: NodeNetwork) -> Split:
        """Divide packets into those that match and the others."""

    def reason(self, packet: Packet, network: NodeNetwork, split: Split) -> str:
        """Return why packets match, or why not; "" if the rule is for another destination, protocol or port."""

    def apply(self, packet: Packet) -> RuleEffect:
        """Return what the rule does to a packet that matches; the rule must not jump."""


class PacketRules(Protocol):
    """The rules of one family on a node."""

    def base_chains(self, hook: Hook) -> Sequence[BaseChain]:
        """Return the chains at a hook, in the order in which packets enter them."""

    def met(self, chain: ChainKey, packet: Packet) -> Sequence[PacketRule]:
        """Return the rules of a chain that a packet can match, in order, and perhaps others.

        A rule that is left out is for another address or port.
        """

    def jump(self, chain: ChainKey, target: str) -> ChainKey | None:
        """Return the chain to which a rule of this chain with a target jumps; None if the target is no chain."""
