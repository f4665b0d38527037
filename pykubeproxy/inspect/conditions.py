"""What rules ask of packets: for each option of iptables whether a packet meets it, and how to say so.

Only what can be told of a first packet is here. An option that is missing counts as not met.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pykubeproxy.inspect.packet import Host, Packet, contains, number

# What share of the packets that are like this one meet a condition: all, none, or by chance some.
Share = Callable[[str, Packet, Host], float]
# What is true of a packet that meets the condition (True) or does not (False); "" if there is nothing to say.
Says = Callable[[str, Packet, bool], str]


class Condition(NamedTuple):
    """A kind of condition.

    `by_destination`: it is about where the packet wants to go. `known`: False if nobody here can tell whether it is
    met; then it is not, negated or not.
    """

    share: Share
    says: Says
    by_destination: bool = False
    known: bool = True


def _address(what: str, of: Callable[[Packet], str], by_destination: bool) -> Condition:
    def says(value: str, packet: Packet, met: bool) -> str:
        address, _, length = value.partition("/")
        one = length in ("", "128" if ":" in address else "32")
        if one:
            return f"its {what} is {address}" if met else f"its {what} {of(packet)} is not {address}"
        return f"its {what} {of(packet)} is {'' if met else 'not '}in {value}"

    return Condition(lambda value, packet, _: contains(value, of(packet)), says, by_destination)


def _range(what: str, of: Callable[[Packet], str], by_destination: bool) -> Condition:
    def share(value: str, packet: Packet, _: Host) -> float:
        first, _dash, last = value.partition("-")
        return number(first) <= number(of(packet)) <= number(last or first)

    def says(value: str, packet: Packet, met: bool) -> str:
        return f"its {what} {of(packet)} is {'' if met else 'not '}in {value}"

    return Condition(share, says, by_destination)


def _address_type(what: str, of: Callable[[Packet], str]) -> Condition:
    def says(value: str, packet: Packet, met: bool) -> str:
        kind = "an address of this node" if value == "LOCAL" else f"of type {value}"
        return f"its {what} {of(packet)} is {'' if met else 'not '}{kind}"

    return Condition(lambda value, packet, host: host.kind_of(of(packet)) in value.split(","), says)


def _interface(direction: str, of: Callable[[Packet], str]) -> Condition:
    def share(value: str, packet: Packet, _: Host) -> float:
        if value.endswith("+"):
            return bool(of(packet)) and of(packet).startswith(value[:-1])
        return of(packet) == value

    def says(value: str, packet: Packet, met: bool) -> str:
        if met:
            return f"it {direction} by {of(packet)}"
        return f"it {direction} by {of(packet) or 'no known interface'}, not {value}"

    return Condition(share, says)


def _ports(text: str, port: int) -> bool:
    """Whether a port is among "80", "8000:8999" or several of these with commas in between."""
    for part in text.split(","):
        first, colon, last = part.partition(":")
        if int(first or 0) <= port <= int((last or 65535) if colon else first):
            return True
    return False


def _port_says(value: str, packet: Packet, met: bool) -> str:
    if value.isdecimal():
        return f"its port is {packet.port}" if met else f"its port {packet.port} is not {value}"
    return f"its port {packet.port} is {'' if met else 'not '}in {value}"


def _protocol(value: str, packet: Packet, _: Host) -> float:
    return value in ("all", packet.protocol, _PROTOCOL_NUMBERS[packet.protocol])


def _mark(value: str, packet: Packet, _: Host) -> float:
    bits, mask = mark_and_mask(value)
    return packet.mark & mask == bits


def _mark_says(value: str, packet: Packet, met: bool) -> str:
    bits, mask = mark_and_mask(value)
    if bits == mask:
        return f"it {'bears' if met else 'does not bear'} the mark {bits:#x}"
    return f"its mark {packet.mark:#x} is {'' if met else 'not '}{value}"


def mark_and_mask(text: str) -> tuple[int, int]:
    """The two numbers of "0x4000/0x4000"; without a mask all 32 bits count."""
    bits, _, mask = text.partition("/")
    return int(bits, 0), int(mask, 0) if mask else 0xFFFFFFFF


def _tcp_flags(value: str, packet: Packet, _: Host) -> float:
    """A first TCP packet has SYN set and no other flag; the value is "flags to look at" "flags that are set"."""
    looked_at, _space, wanted = value.partition(" ")
    found = {"SYN"} & (set(looked_at.split(",")) if looked_at != "ALL" else {"SYN"})
    return packet.protocol == "tcp" and found == set(wanted.split(",")) - {"NONE"}


def _states(value: str, packet: Packet, _: Host) -> float:
    return not set(packet.states).isdisjoint(value.split(","))


def _states_say(value: str, packet: Packet, met: bool) -> str:
    states = value.split(",")
    if met:
        return f"its state is {' and '.join(state for state in packet.states if state in states)}"
    return f"its state is not {' or '.join(states)}"


def _always(says: str = "") -> Condition:
    return Condition(lambda _, __, ___: 1.0, lambda _, __, ___: says)


def _never(says: str) -> Condition:
    return Condition(lambda _, __, ___: 0.0, lambda _, __, ___: says)


def _chance(share: Callable[[str], float]) -> Condition:
    def says(value: str, _: Packet, met: bool) -> str:
        taken = share(value) if met else 1 - share(value)
        return f"chance takes {100 * taken:.4g} % of the packets that get here"

    return Condition(lambda value, _, __: share(value), says)


_PROTOCOL_NUMBERS = {"tcp": "6", "udp": "17", "sctp": "132"}
_PORT = Condition(lambda value, packet, _: _ports(value, packet.port), _port_says, True)
_SOURCE_PORT = _never("its source port is not known")
_STATE = Condition(_states, _states_say)
_FIRST_CONNECTION = _never("the client is taken for a new one, whom no endpoint remembers")

# By module, "" for what needs none, and option.
_CONDITIONS: Mapping[tuple[str, str], Condition] = {
    ("", "-s"): _address("source", lambda packet: packet.source, False),
    ("", "-d"): _address("destination", lambda packet: packet.destination, True),
    ("", "-i"): _interface("came in", lambda packet: packet.received_by),
    ("", "-o"): _interface("goes out", lambda packet: packet.sent_by),
    ("", "-p"): Condition(
        _protocol,
        lambda value, packet, met: (
            f"it is {packet.protocol.upper()}{'' if met else f', not {value.upper()}'}"
        ),
        True,
    ),
    ("", "-f"): _never("it is no fragment"),
    **{(module, "--dport"): _PORT for module in _PROTOCOL_NUMBERS},
    **{(module, "--sport"): _SOURCE_PORT for module in _PROTOCOL_NUMBERS},
    ("tcp", "--tcp-flags"): Condition(
        _tcp_flags, lambda value, _, met: f"its flag SYN {'meets' if met else 'does not meet'} {value}"
    ),
    ("multiport", "--dports"): _PORT,
    ("multiport", "--ports"): _PORT,
    ("multiport", "--sports"): _SOURCE_PORT,
    ("iprange", "--src-range"): _range("source", lambda packet: packet.source, False),
    ("iprange", "--dst-range"): _range("destination", lambda packet: packet.destination, True),
    ("addrtype", "--src-type"): _address_type("source", lambda packet: packet.source),
    ("addrtype", "--dst-type"): _address_type("destination", lambda packet: packet.destination),
    ("conntrack", "--ctstate"): _STATE,
    ("state", "--state"): _STATE,
    ("mark", "--mark"): Condition(_mark, _mark_says),
    ("statistic", "--probability"): _chance(float),
    ("statistic", "--every"): _chance(lambda every: 1 / int(every)),
    ("recent", "--rcheck"): _FIRST_CONNECTION,
    ("recent", "--update"): _FIRST_CONNECTION,
    ("recent", "--remove"): _FIRST_CONNECTION,
    ("recent", "--set"): _always("the client is remembered from now on"),
    ("limit", "--limit"): _always("a first packet is within any limit"),
}
# Options that only qualify another one, by module; and modules that let every packet pass.
_DETAILS: Mapping[str, frozenset[str]] = {
    "statistic": frozenset({"--mode", "--packet"}),
    "recent": frozenset(
        {"--seconds", "--reap", "--hitcount", "--rttl", "--name", "--mask", "--rsource", "--rdest"}
    ),
    "limit": frozenset({"--limit-burst"}),
    "comment": frozenset({"--comment"}),
    "nfacct": frozenset({"--nfacct-name"}),
}
_MODULES = {module for module, _ in _CONDITIONS} | set(_DETAILS)


def condition(module: str, option: str) -> Condition | None:
    """The condition that an option of a module stands for; None if it only qualifies another one."""
    if option in _DETAILS.get(module, ()):
        return None
    return _CONDITIONS.get((module, option)) or _unknown(f"-m {module} {option}" if module else option)


def unknown_module(module: str) -> Condition | None:
    """A condition for a module of which nothing is known, for it may need no option; None if it is known."""
    return None if module in _MODULES else _unknown(f"-m {module}")


def _unknown(text: str) -> Condition:
    says = f"what it asks for ({text}) is not known here, so it is taken as not matching"
    return _never(says)._replace(known=False)
