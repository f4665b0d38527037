"""What the kernel remembers of connections: the flows of conntrack, and the clients of session affinity.

Read from what `conntrack -L`, /proc/net/nf_conntrack and /proc/net/xt_recent/ print, wherever it was printed.
"""

import enum
import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache

import msgspec

from pykubeproxy.objects import EndpointSlice, Family, Protocol, address_and_port, family_of
from pykubeproxy.services.ports import PortName

_TUPLE = r"src=(?P<{0}_source>\S+) dst=(?P<{0}_to>\S+) sport=(?P<{0}_source_port>\d{{1,5}}) dport=(?P<{0}_to_port>\d{{1,5}})"
# A family comes before the protocol in some formats. A flow that hardware forwards has no timeout.
_LINE = re.compile(
    r"\b(?P<protocol>tcp|udp|sctp) +\d+ +(?:(?P<timeout>\d{1,10}) +)?(?:(?P<state>[A-Z]\w*) +)?"
    rf"{_TUPLE.format('original')} (?P<between>.*?){_TUPLE.format('reply')}(?P<rest>.*)"
)
_MARK = re.compile(r"\bmark=(\d{1,10})")
# Service proxies use the default zone, which is not printed, or as 0.
_OTHER_ZONE = re.compile(r"\bzone(?:-orig|-reply)?=0*[1-9]")
_KNOWN_ADDRESSES = 100_000
# As `recent_lines` of the kernel package prints it, or grep for the files in /proc/net/xt_recent.
_RECENT = re.compile(
    r"^(?:/proc/net/xt_recent/)?(?P<list>[\w-]+): ?src=(?P<client>\S+)(?:.*\bage=(?P<age>\d{1,10}))?",
    re.MULTILINE,
)
# States in which a connection ends. Without traffic, its entry goes within minutes.
_ENDING = frozenset(
    (
        *("FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE", "CLOSED"),
        *("SHUTDOWN_SENT", "SHUTDOWN_RECD", "SHUTDOWN_ACK_SENT"),
    )
)
_OPENING = frozenset(("SYN_SENT", "SYN_SENT2", "SYN_RECV", "COOKIE_WAIT", "COOKIE_ECHOED"))


class FlowSide(msgspec.Struct, frozen=True, rename="camel"):
    """The packets of one direction.

    - `source`, `destination`: their addresses
    - `source_port`, `destination_port`: their ports
    """

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
    - `timeout`: seconds until the entry ends if no packet comes; null if hardware forwards the packets
    - `mark`: that of conntrack
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
    def ending(self) -> bool:
        """Whether an end has begun to close the connection."""
        return self.state in _ENDING

    @property
    def unanswered(self) -> bool:
        """Whether the connection still waits for an answer of its receiver."""
        return self.unreplied or self.state in _OPENING

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


class RememberedClient(msgspec.Struct, frozen=True):
    """A client in a list of the iptables match `recent`, and the seconds since its last connection; None if unknown."""

    list: str
    client: str
    age: int | None


class FlowTable(msgspec.Struct, frozen=True):
    """The flows of a node and the clients in its affinity lists.

    `unread` and `unread_lists` say why one of them could not be read, and what to do; "" if they could.
    """

    flows: tuple[Flow, ...] = ()
    remembered: tuple[RememberedClient, ...] = ()
    unread: str = ""
    unread_lists: str = ""


def parse_flow_table(text: str, unread: str = "", unread_lists: str = "") -> FlowTable:
    """Read lines of flows and of affinity lists, in any order. Skip other lines."""
    return FlowTable(tuple(parse_flows(text)), tuple(_remembered(text)), unread, unread_lists)


def _remembered(text: str) -> Iterator[RememberedClient]:
    for found in _RECENT.finditer(text):
        with suppress(ValueError):
            age = int(found["age"]) if found["age"] else None
            yield RememberedClient(found["list"], _canonical(found["client"]), age)


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


class FlowProblem(enum.Enum):
    """What is wrong with a flow.

    - STALE: its endpoint no longer serves the port; it stays there until an end closes it
    - NOT_TRANSLATED: it goes to the Service's address itself, as it began without rules
    - UNANSWERED: its receiver has not answered
    """

    STALE = "stale"
    NOT_TRANSLATED = "not-translated"
    UNANSWERED = "unanswered"


def served_endpoints(slices: Iterable[EndpointSlice], name: PortName, family: Family) -> frozenset[str]:
    """Return the endpoints in EndpointSlices of a Service that may serve a port, as "IP:PORT".

    An endpoint without new traffic (terminating, or meant for other zones) keeps its connections while it serves.
    """
    return frozenset(
        address_and_port(endpoint.address, port.port)
        for slice_ in slices
        if slice_.family is family
        for port in slice_.ports
        if port.port and port.name == name.port and port.protocol.value == name.protocol
        for endpoint in slice_.endpoints
        if endpoint.ready or endpoint.serving
    )


def flow_problem(flow: Flow, served: Collection[str] | None) -> FlowProblem | None:
    """Return what is wrong with a flow; `served` are the endpoints of the frontend that it goes to, None if unknown."""
    if served is not None and not flow.ending:
        if not flow.translated_to:
            return FlowProblem.NOT_TRANSLATED if served else None
        if flow.translated_to not in served:
            return FlowProblem.STALE
    return FlowProblem.UNANSWERED if flow.unanswered else None
