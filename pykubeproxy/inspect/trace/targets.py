"""Apply built-in iptables targets to a packet."""

import enum
from collections.abc import Mapping

import msgspec

from pykubeproxy.inspect.trace.conditions import mark_and_mask
from pykubeproxy.inspect.trace.packet import DNAT, SNAT, UNTRACKED, Packet
from pykubeproxy.inspect.trace.rule import CompiledRule


class End(enum.Enum):
    """How a packet leaves a table."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"


class Effect(msgspec.Struct, frozen=True):
    """The packet after a target; without an end it continues with the next rule. `remark` may be ""."""

    packet: Packet
    end: End | None = None
    remark: str = ""


# Targets that count, log, or change fields no known condition reads.
_NO_EFFECT = frozenset(
    [
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
        "SET",
        "TCPMSS",
        "TOS",
        "TRACE",
        "TTL",
        "ULOG",
    ]
)


def apply_target(rule: CompiledRule, packet: Packet) -> Effect:
    """Apply the target of a rule that matches; it must not be a chain."""
    target, options = rule.target, rule.options
    if target in ("ACCEPT", "DROP", "REJECT"):
        return Effect(packet, End(target))
    if target == "DNAT":
        return Effect(_dnat(packet, options.get("--to-destination", "")), End.ACCEPT)
    if target in ("MASQUERADE", "SNAT"):
        return Effect(_snat(packet, options.get("--to-source", "")), End.ACCEPT)
    if target == "MARK":
        return Effect(msgspec.structs.replace(packet, mark=_mark(packet.mark, options)))
    if target == "NOTRACK" or (target == "CT" and "--notrack" in options):
        remark = "the connection is not tracked and skips table nat"
        return Effect(msgspec.structs.replace(packet, states=(UNTRACKED,)), remark=remark)
    if target and target not in _NO_EFFECT:
        return Effect(packet, remark=f"trace does not know {target} and assumes that the packet continues")
    return Effect(packet)


def _dnat(packet: Packet, to: str) -> Packet:
    """Replace the destination; an address or port that is not given stays."""
    address, port = _first(to)
    return msgspec.structs.replace(
        packet,
        destination=address or packet.destination,
        port=int(port or packet.port),
        states=(*packet.states, DNAT),
    )


def _snat(packet: Packet, to: str) -> Packet:
    """Replace the source; it stays for MASQUERADE, which picks an address of the node."""
    return msgspec.structs.replace(
        packet, source=_first(to)[0] or packet.source, states=(*packet.states, SNAT)
    )


def _first(text: str) -> tuple[str, str]:
    """Parse "address:port", "[address]:port" or either part alone; of a range take the first."""
    if text.startswith("["):
        address, _, rest = text[1:].partition("]")
        port = rest.rpartition("]")[2].removeprefix(":")
    elif text.count(":") > 1:
        address, port = text, ""
    else:
        address, _, port = text.partition(":")
    return address.partition("-")[0], port.partition("-")[0]


def _mark(mark: int, options: Mapping[str, str]) -> int:
    """Apply the options of MARK; iptables-save prints only --set-xmark."""
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
