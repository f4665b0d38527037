"""What the targets of iptables that are not chains do to a packet."""

import enum
from collections.abc import Mapping

import msgspec

from pykubeproxy.inspect.conditions import mark_and_mask
from pykubeproxy.inspect.matching import Rule
from pykubeproxy.inspect.packet import DNAT, SNAT, UNTRACKED, Packet


class End(enum.Enum):
    """How a packet leaves a table."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"


class Effect(msgspec.Struct, frozen=True):
    """What became of the packet; without an end it goes on to the next rule. `remark` is for the reader, or ""."""

    packet: Packet
    end: End | None = None
    remark: str = ""


# Targets that count, log, or change what no rule here looks at.
_PASSED_OVER = frozenset(
    {
        "AUDIT",
        "CHECKSUM",
        "CLASSIFY",
        "CONNMARK",
        "CONNSECMARK",
        "CT",
        "DSCP",
        "HL",
        "LOG",
        "NFLOG",
        "SECMARK",
    }
    | {"SET", "TCPMSS", "TOS", "TRACE", "TTL", "ULOG"}
)


def act(rule: Rule, packet: Packet) -> Effect:
    """Apply a rule's target, which is not a chain, to a packet that the rule is for."""
    target, options = rule.target, rule.options
    if target in ("ACCEPT", "DROP", "REJECT"):
        return Effect(packet, End(target))
    if target == "DNAT":
        return Effect(_redirected(packet, options.get("--to-destination", "")), End.ACCEPT)
    if target in ("MASQUERADE", "SNAT"):
        return Effect(_masked(packet, options.get("--to-source", "")), End.ACCEPT)
    if target == "MARK":
        return Effect(msgspec.structs.replace(packet, mark=_marked(packet.mark, options)))
    if target == "NOTRACK" or (target == "CT" and "--notrack" in options):
        remark = "the connection is not tracked, so table nat is passed by"
        return Effect(msgspec.structs.replace(packet, states=(UNTRACKED,)), remark=remark)
    if target and target not in _PASSED_OVER:
        return Effect(packet, remark=f"what {target} does is not known here, so the packet is taken to go on")
    return Effect(packet)


def _redirected(packet: Packet, to: str) -> Packet:
    """Another destination; what is not named, address or port, stays."""
    address, port = _first(to)
    return msgspec.structs.replace(
        packet,
        destination=address or packet.destination,
        port=int(port or packet.port),
        states=(*packet.states, DNAT),
    )


def _masked(packet: Packet, to: str) -> Packet:
    """Another source: with SNAT the one that is named; which one MASQUERADE takes is not worked out."""
    return msgspec.structs.replace(
        packet, source=_first(to)[0] or packet.source, states=(*packet.states, SNAT)
    )


def _first(text: str) -> tuple[str, str]:
    """The address and the port of "address:port", "[address]:port" or either alone; of a range the first."""
    if text.startswith("["):
        address, _, rest = text[1:].partition("]")
        port = rest.rpartition("]")[2].removeprefix(":")
    elif text.count(":") > 1:
        address, port = text, ""
    else:
        address, _, port = text.partition(":")
    return address.partition("-")[0], port.partition("-")[0]


def _marked(mark: int, options: Mapping[str, str]) -> int:
    """The mark after --set-xmark, which is all that iptables-save prints, or another of MARK's options."""
    for option, value in options.items():
        bits, mask = mark_and_mask(value)
        match option:
            case "--set-xmark":
                return mark & ~mask ^ bits
            case "--set-mark":
                return mark & ~mask | bits
            case "--or-mark":
                return mark | bits
            case "--and-mark":
                return mark & bits
            case "--xor-mark":
                return mark ^ bits
    return mark
