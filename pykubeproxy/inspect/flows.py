"""The flows in the kernel's connection tracking table, as `conntrack -L` and /proc/net/nf_conntrack print them."""

import ipaddress
import re
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from pykubeproxy.objects import Family, Protocol, address_and_port, family_of

_TUPLE = (
    r"src=(?P<{0}_source>\S+) dst=(?P<{0}_to>\S+) sport=(?P<{0}_source_port>\d+) dport=(?P<{0}_to_port>\d+)"
)
# A family comes before the protocol in some formats. A flow that hardware forwards has no timeout.
_LINE = re.compile(
    r"\b(?P<protocol>tcp|udp|sctp) +\d+ +(?:(?P<timeout>\d+) +)?(?:(?P<state>[A-Z]\w*) +)?"
    rf"{_TUPLE.format('original')} (?P<between>.*?){_TUPLE.format('reply')}(?P<rest>.*)"
)
_MARK = re.compile(r"\bmark=(\d+)")
# Service proxies use the default zone, which is not printed, or as 0.
_OTHER_ZONE = re.compile(r"\bzone(?:-orig|-reply)?=0*[1-9]")
_KNOWN_ADDRESSES = 100_000


class FlowSide(msgspec.Struct, frozen=True, rename="camel"):
    """The addresses and ports of the packets of one direction."""

    source: str
    source_port: int
    destination: str
    destination_port: int


class Flow(msgspec.Struct, frozen=True):
    """A tracked connection: an entry of conntrack.

    - `original`: packets of the client, before NAT
    - `reply`: packets that the kernel expects as replies, before NAT
    - `state`: of TCP and SCTP, such as "SYN_SENT" or "ESTABLISHED"; "" for UDP
    - `unreplied`: no reply has been seen
    - `assured`: packets of both directions have been seen, so a full table keeps the entry
    - `timeout`: seconds until the entry ends if no packet comes; None if hardware forwards the packets
    """

    family: Family
    protocol: Protocol
    original: FlowSide
    reply: FlowSide
    state: str = ""
    unreplied: bool = False
    assured: bool = False
    timeout: int | None = None
    mark: int = 0

    @property
    def translated_to(self) -> str:
        """The endpoint with its port that NAT chose; "" without DNAT."""
        endpoint = (self.reply.source, self.reply.source_port)
        if endpoint == (self.original.destination, self.original.destination_port):
            return ""
        return address_and_port(*endpoint)

    @property
    def source_seen(self) -> str:
        """The source with its port that the receiver sees."""
        return address_and_port(self.reply.destination, self.reply.destination_port)


def parse_flows(text: str) -> list[Flow]:
    """Read what `conntrack -L` and `conntrack -L -o extended` print, or /proc/net/nf_conntrack.

    Skip entries of other protocols than TCP, UDP and SCTP, entries of other zones than the default one, and lines that
    are no entries.
    """
    return list(_flows(text))


def _flows(text: str) -> Iterator[Flow]:
    for line in text.splitlines():
        found = _LINE.search(line)
        if found is None or _OTHER_ZONE.search(line):
            continue
        try:
            original, reply = _side(found, "original"), _side(found, "reply")
        except ValueError:
            continue
        mark = _MARK.search(found["rest"])
        yield Flow(
            family=family_of(original.source),
            protocol=Protocol(found["protocol"].upper()),
            original=original,
            reply=reply,
            state=found["state"] or "",
            unreplied="[UNREPLIED]" in found["between"],
            assured="[ASSURED]" in found["rest"],
            timeout=int(found["timeout"]) if found["timeout"] else None,
            mark=int(mark[1]) if mark else 0,
        )


def _side(found: re.Match[str], name: str) -> FlowSide:
    return FlowSide(
        _canonical(found[f"{name}_source"]),
        int(found[f"{name}_source_port"]),
        _canonical(found[f"{name}_to"]),
        int(found[f"{name}_to_port"]),
    )


@lru_cache(_KNOWN_ADDRESSES)
def _canonical(address: str) -> str:
    """Return an address in its short form; /proc/net/nf_conntrack has all digits of an IPv6 address."""
    return str(ipaddress.ip_address(address))
