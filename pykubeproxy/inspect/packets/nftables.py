"""The rules of nftables for packets: their tables, expressions, sets and maps.

A rule that has an unknown expression counts as not met. Packets are the first of their connection.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import and_, lshift, or_, rshift, xor
from typing import NamedTuple

import msgspec

from pykubeproxy.inspect.packets.addresses import (
    Addresses,
    Range,
    every_address,
    intersection,
    number,
    parse_addresses,
    subtract,
    union,
)
from pykubeproxy.inspect.packets.packet import (
    DNAT,
    LO,
    SNAT,
    UNTRACKED,
    AffinityList,
    NodeNetwork,
    Packet,
)
from pykubeproxy.inspect.packets.rule_set import (
    EVERY_PACKET,
    NO_INTERFACE,
    NOT_KNOWN,
    BaseChain,
    Hook,
    RuleEffect,
    RuleEnd,
    Split,
)
from pykubeproxy.objects import Family, address_and_port, family_of
from pykubeproxy.rules.nft_list import Json, NftRule, NftRuleset, NftSet, SetKey, anonymous_elements
from pykubeproxy.rules.nft_text import expression_text, rule_text, statement_text
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.wording import listed, percent


class _NotKnownError(Exception):
    """An expression cannot be evaluated. str() is its text."""


class _NoValueError(Exception):
    """A packet does not have a field, so that it does not match, even if the condition is negated. str() is why."""


class _Type(NamedTuple):
    """How values of fields are written: `symbols` stand for numbers, or for bits that may be combined."""

    symbols: Mapping[str, int] = {}


_ADDRESS, _NUMBER, _NAME = _Type(), _Type(), _Type()
_PROTOCOL = _Type({"icmp": 1, "tcp": 6, "udp": 17, "ipv6-icmp": 58, "sctp": 132})
_FAMILY = _Type({"ipv4": 2, "ipv6": 10, "ip": 2, "ip6": 10})
_STATE = _Type({"invalid": 1, "established": 2, "related": 4, "new": 8, "untracked": 64})
_STATUS = _Type(
    {"expected": 1, "seen-reply": 2, "assured": 4, "confirmed": 8, "snat": 16, "dnat": 32, "dying": 512}
)
_DIRECTION = _Type({"original": 0, "reply": 1})
_TCP_FLAGS = _Type({"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16, "urg": 32, "ecn": 64, "cwr": 128})
_OPERATORS = {"&": and_, "|": or_, "^": xor, "<<": lshift, ">>": rshift}
_ALL_BITS = 0xFFFFFFFF


class _Sources(NamedTuple):
    """Stands for the source of many clients in a key. `named` returns those that an element of a set names."""

    named: Callable[["_Part"], Addresses]


class _Chance(NamedTuple):
    """Stands for a number of a range that has the same probability as all others of it."""

    numbers: Range


# A part of an element of a set: numbers, or a name, perhaps with "*" at its end.
_Part = Range | str
_Value = int | str | _Sources | _Chance


class _Field(NamedTuple):
    """A field of packets: what it is called, its value, and whether it concerns destination, port or protocol."""

    what: str
    type: _Type
    value: Callable[[Packet], Json]
    by_destination: bool = False


_SOURCES = ("ip saddr", "ip6 saddr")
_FIELDS: Mapping[str, _Field] = {
    name: field
    for names, field in (
        (_SOURCES, _Field("source", _ADDRESS, lambda packet: packet.source)),
        (
            ("ip daddr", "ip6 daddr"),
            _Field("destination", _ADDRESS, lambda packet: packet.destination, by_destination=True),
        ),
        (
            ("meta l4proto", "ip protocol", "ip6 nexthdr"),
            _Field("protocol", _PROTOCOL, lambda packet: packet.protocol, by_destination=True),
        ),
        (
            ("th dport", "tcp dport", "udp dport", "sctp dport"),
            _Field("port", _NUMBER, lambda packet: packet.port, by_destination=True),
        ),
        (("tcp flags",), _Field("TCP flag", _TCP_FLAGS, lambda _: "syn")),
        (("iif", "iifname"), _Field("incoming interface", _NAME, lambda packet: packet.received_by)),
        (("oif", "oifname"), _Field("outgoing interface", _NAME, lambda packet: packet.sent_by)),
        (
            ("meta nfproto", "meta protocol"),
            _Field("address family", _FAMILY, lambda packet: family_of(packet.destination).value.lower()),
        ),
        (("meta mark",), _Field("mark", _NUMBER, lambda packet: packet.mark)),
        (("meta pkttype",), _Field("type", _NAME, lambda _: "host")),
        (("ct mark",), _Field("connection mark", _NUMBER, lambda packet: packet.connection_mark)),
        (("ct state",), _Field("state", _STATE, lambda packet: packet.states[0].lower())),
        (
            ("ct status",),
            _Field("status", _STATUS, lambda packet: [one.lower() for one in packet.states[1:]]),
        ),
        (("ct direction",), _Field("direction", _DIRECTION, lambda _: "original")),
    )
    for name in names
}
_OF_HEADER = {"ip": Family.IPV4, "ip6": Family.IPV6}
# Headers that only packets of one protocol have.
_TRANSPORTS = ("tcp", "udp", "sctp", "icmp", "icmpv6", "igmp", "esp", "ah", "comp", "dccp", "udplite", "gre")
# What these do concerns later packets, or fields that no known expression reads.
_NO_EFFECT = ("counter", "log", "last", "flow", "dup", "meter", "map", "secmark")
_NO_EFFECT_ON_CONNECTIONS = ("ct helper", "ct timeout", "ct expectation")
# Fields of a packet that rules may write without a translation that its connection remembers.
_REWRITTEN = ("saddr", "daddr", "sport", "dport")
_ENDS = {"accept": RuleEnd.ACCEPT, "drop": RuleEnd.DROP, "reject": RuleEnd.REJECT, "return": RuleEnd.RETURN}


class _Outcome(NamedTuple):
    """What a statement does to a part of packets: they continue with the next one, miss the rule, or leave it."""

    packet: Packet
    share: float
    missed: bool = False
    effect: RuleEffect | None = None


class _Element(NamedTuple):
    """An element of a set or map: the parts of its key, none for "*", and what the map has for it."""

    parts: tuple[_Part, ...]
    data: Json


class _Elements:
    """The elements of a set or map, found by their keys."""

    def __init__(self, elements: Sequence[_Element]) -> None:
        self._exact: dict[tuple[int | str, ...], _Element] = {}
        self._others: list[_Element] = []
        # The element for all other keys.
        self.for_others = next((element for element in elements if not element.parts), None)
        self._without: dict[int, dict[tuple[int | str, ...], list[_Element]]] = {}
        for element in elements:
            if element.parts and (key := _exact_key(element.parts)) is not None:
                self._exact[key] = element
            elif element.parts:
                self._others.append(element)

    def find(self, key: Sequence[int | str]) -> _Element | None:
        """Return the element with a key; the one for all others if there is no such element."""
        if found := self._exact.get(tuple(key)):
            return found
        fitting = (one for one in self._others if all(map(_has, one.parts, key)))
        return next(fitting, self.for_others)

    def find_all(self, key: Sequence[int | str], position: int) -> Sequence[_Element]:
        """Return the elements whose key is this one but for a part at a position, which `key` lacks."""
        if position not in self._without:
            index = self._without[position] = {}
            for exact, element in self._exact.items():
                index.setdefault(exact[:position] + exact[position + 1 :], []).append(element)
        others = (
            one
            for one in self._others
            if all(map(_has, one.parts[:position] + one.parts[position + 1 :], key))
        )
        return [*self._without[position].get(tuple(key), ()), *others]


def _exact_key(parts: Sequence[_Part]) -> tuple[int | str, ...] | None:
    key: list[int | str] = []
    for part in parts:
        if isinstance(part, Range) and part.first == part.last:
            key.append(part.first)
        elif isinstance(part, str) and not part.endswith("*"):
            key.append(part)
        else:
            return None
    return tuple(key)


def _has(part: _Part, value: int | str) -> bool:
    if isinstance(part, str):
        return isinstance(value, str) and (
            value.startswith(part[:-1]) if part.endswith("*") and value else value == part
        )
    return isinstance(value, int) and part.first <= value <= part.last


def _part(type_: _Type, value: Json) -> _Part:
    """Return a value as numbers or a name. Raises _NotKnownError, ValueError."""
    match value:
        case bool() | int():
            return Range(int(value), int(value))
        case {"prefix": {"addr": str(address), "len": length}}:
            return parse_addresses(f"{address}/{length}")[0]
        case {"range": [first, last]}:
            start, end = _part(type_, first), _part(type_, last)
            if isinstance(start, Range) and isinstance(end, Range):
                return Range(start.first, end.last)
        case {"elem": {"val": element}}:
            return _part(type_, element)
        case {"|": list(flags)} | list(flags):
            return Range(*[reduce(or_, [_number(type_, flag) for flag in flags], 0)] * 2)
        case str() if type_ is _ADDRESS:
            return Range(number(value), number(value))
        case str() if type_ is _NAME:
            return value
        case str() if value in type_.symbols:
            return Range(type_.symbols[value], type_.symbols[value])
        case str() if type_ is _PROTOCOL:  # one that no packet here has
            return Range(-1, -1)
    raise _NotKnownError(expression_text(value))


def _number(type_: _Type, value: Json) -> int:
    """Return a value that is one number. Raises _NotKnownError."""
    part = _part(type_, value)
    if isinstance(part, Range) and part.first == part.last:
        return part.first
    raise _NotKnownError(expression_text(value))


class _Component(NamedTuple):
    """A part of the key with which a rule looks up sets: what it is, how it is written, and its value for a packet."""

    what: str
    type: _Type
    shown: str
    value: _Value
    by_destination: bool = False


def _component(expression: Json, packet: Packet, network: NodeNetwork) -> _Component:
    """Evaluate a part of a key. Raises _NotKnownError, _NoValueError."""
    match expression:
        case {"numgen": {"mod": int(mod), "offset": int(first)}} if mod > 0:
            return _Component("random number", _NUMBER, "", _Chance(Range(first, first + mod - 1)))
        case {"jhash": {"mod": int(mod)}} | {"symhash": {"mod": int(mod)}} if mod > 0:
            return _Component("hash", _NUMBER, "", _Chance(Range(0, mod - 1)))
        case {"fib": {"result": "type", "flags": flags}}:
            return _address_type(flags, packet, network)
        case {"fib": {"result": "oif" | "check", "flags": flags}}:
            return _route_exists(expression, flags, packet, network)
        case {"payload": _} | {"meta": _} | {"ct": _}:
            return _field(expression_text(expression), packet)
        case Mapping() if (operator := next(iter(expression), "")) in _OPERATORS:
            operands = expression[operator]
            left = (
                _component(operands[0], packet, network) if operands and isinstance(operands, list) else None
            )
            if left and isinstance(operands, list) and isinstance(left.value, int):
                others = [_number(left.type, operand) for operand in operands[1:]]
                result = reduce(_OPERATORS[operator], others, left.value) & _ALL_BITS
                return left._replace(value=result, shown=f"{result:#x}")
    raise _NotKnownError(expression_text(expression))


def _field(name: str, packet: Packet) -> _Component:
    """Evaluate a field that nft writes with this name. Raises _NotKnownError, _NoValueError."""
    header, _, field = name.partition(" ")
    if header in _OF_HEADER and _OF_HEADER[header] is not family_of(packet.destination):
        raise _NoValueError(f"it is no packet of {_OF_HEADER[header].value}")
    if header in _TRANSPORTS and header != packet.protocol:
        raise _NoValueError(f"it is {packet.protocol.upper()}, not {header.upper()}")
    if field == "sport":
        raise _NoValueError("its source port is unknown")
    if header == "ct" and UNTRACKED in packet.states and name != "ct state":
        raise _NoValueError("its connection is not tracked")
    if name in ("meta skuid", "meta skgid") and not packet.starts_here:
        raise _NoValueError("no process of this node sends it")
    if name not in _FIELDS:
        raise _NotKnownError(name)
    what, type_, get, by_destination = _FIELDS[name]
    if name in _SOURCES and packet.clients and not packet.source:
        return _Component(what, type_, "", _Sources(lambda part: (part,) if isinstance(part, Range) else ()))
    value = get(packet)
    shown = f"{value:#x}" if "mark" in what else expression_text(value)
    part = _part(type_, value)
    return _Component(
        what, type_, shown or "unknown", part.first if isinstance(part, Range) else part, by_destination
    )


def _address_type(flags: Json, packet: Packet, network: NodeNetwork) -> _Component:
    of_source = "saddr" in flags if isinstance(flags, str | list) else False
    what = f"type of its {'source' if of_source else 'destination'}"
    if of_source and packet.clients and not packet.source:
        own = network.own_addresses(family_of(packet.destination))
        others = subtract(every_address(family_of(packet.destination)), own)
        named = {"local": own, "unicast": others}
        return _Component(
            what, _NAME, "", _Sources(lambda part: named.get(part, ()) if isinstance(part, str) else ())
        )
    address = packet.source if of_source else packet.destination
    found = network.address_type(address).lower()
    return _Component(what, _NAME, f"{found} ({address})", found)


def _route_exists(expression: Json, flags: Json, packet: Packet, network: NodeNetwork) -> _Component:
    """Return whether there is a route, to the interface by which the packet came in if `iif` is among the flags."""
    address = packet.source if isinstance(flags, list) and "saddr" in flags else packet.destination
    interface = network.interface_to(address) if address else ""
    if not interface or not packet.received_by:
        raise _NotKnownError(expression_text(expression))
    exists = not (isinstance(flags, list) and "iif" in flags) or interface == packet.received_by
    return _Component(f"route to {address}", _NUMBER, "there" if exists else "missing", int(exists))


class CompiledNftRule:
    """A rule with the sets of its table."""

    def __init__(self, rule: NftRule, sets: "_Sets", table: str) -> None:
        self.text = rule_text(rule)
        self.comment = rule.comment
        self._statements = rule.statements
        self._sets = sets
        self._table = table

    @property
    def affinity(self) -> int:
        for statement in self._statements:
            match statement:
                case {"match": {"op": "==", "left": {"payload": {"field": "saddr"}}, "right": known}}:
                    return self._sets.timeout(self._table, known)
        return 0

    def split(self, packet: Packet, network: NodeNetwork) -> Split:
        """Divide packets into those that match and the others."""
        parts, missed = [(packet, 1.0)], list[tuple[Packet, float]]()
        matched: list[tuple[RuleEffect, float]] = []
        failed, error = -1, ""
        for position, statement in enumerate(self._statements):
            onward: list[tuple[Packet, float]] = []
            for part, share in parts:
                try:
                    outcomes = list(self._outcomes(statement, part, network))
                except (_NotKnownError, _NoValueError, ValueError) as caught:
                    outcomes = [_Outcome(part, 1.0, missed=True)]
                    error = _reason(caught)
                for outcome in outcomes:
                    probability = share * outcome.share
                    if outcome.missed:
                        missed.append((outcome.packet, probability))
                    elif outcome.effect:
                        matched.append((outcome.effect, probability))
                    else:
                        onward.append((outcome.packet, probability))
            if parts and not onward and not matched:
                failed = position
            parts = onward
            if not parts:
                break
        matched += [(RuleEffect(part), share) for part, share in parts]
        return Split(tuple(matched), tuple(missed), failed, error)

    def reason(self, packet: Packet, network: NodeNetwork, split: Split) -> str:
        """Return why packets match, or why not; "" if the rule is for another destination, protocol or port."""
        if split.matched:
            facts = [self._fact(statement, packet, network, met=True) for statement in self._statements]
            return ", ".join(filter(None, [*facts, split.error])) or EVERY_PACKET
        first, *later = self._statements[split.failed :]
        if any(self._misses(statement, packet, network) for statement in later):
            return ""
        if self._is_by_destination(first, packet, network):
            return ""
        return split.error or self._fact(first, packet, network, met=False)

    def _is_by_destination(self, statement: Mapping[str, Json], packet: Packet, network: NodeNetwork) -> bool:
        try:
            return any(one.by_destination for one in self._key(statement, packet, network))
        except (_NotKnownError, ValueError):
            return False
        except _NoValueError:  # it is for another protocol or family
            return "ct" not in str(statement) and "skuid" not in str(statement)

    def _misses(self, statement: Mapping[str, Json], packet: Packet, network: NodeNetwork) -> bool:
        """Return whether no packet to this destination meets a condition."""
        if not self._is_by_destination(statement, packet, network):
            return False
        try:
            return all(outcome.missed for outcome in self._outcomes(statement, packet, network))
        except (_NotKnownError, ValueError):
            return False
        except _NoValueError:
            return True

    def _key(
        self, statement: Mapping[str, Json], packet: Packet, network: NodeNetwork
    ) -> Sequence[_Component]:
        """Return the parts of the key that a condition looks up; none for other statements."""
        match statement:
            case {"match": {"left": expression}} | {"vmap": {"key": expression}}:
                return _components(expression, packet, network)
        return ()

    def _fact(self, statement: Mapping[str, Json], packet: Packet, network: NodeNetwork, *, met: bool) -> str:
        """Return why packets meet a condition, or why not; "" for other statements."""
        if "limit" in statement or "quota" in statement or "ct count" in statement:
            return "a first packet is within any limit"
        try:
            key = self._key(statement, packet, network)
        except (_NotKnownError, _NoValueError, ValueError):  # it depends on what the rule does before
            return ""
        shown = [one for one in key if one.shown]
        if not shown:
            return ""
        what = listed(one.what for one in shown)
        is_ = "is" if len(shown) == 1 else "are"
        values = " . ".join(one.shown for one in shown)
        if not (met or network.routes) and any(_is_unknown_interface(one, packet) for one in key):
            match statement:
                case {"match": {"right": other}} | {"vmap": {"data": other}} if other != LO:
                    return f"{NO_INTERFACE} and assumes that {statement_text(statement)} does not match"
        match statement:
            case {"match": {"op": op, "right": right}}:
                negated = (op == "!=") is met
                text = expression_text(right)
                if text == values:
                    return f"its {what} {is_} {'not ' if negated else ''}{text}"
                within = "in " if text[:1] in "@{" or "/" in text or "-" in text else ""
                compared = f"{op} " if op in ("<", ">", "<=", ">=") else within
                return f"its {what} {values} {is_} {'not ' if negated else ''}{compared}{text}"
            case {"vmap": {"data": data}}:
                return f"its {what} {values} {is_} {'' if met else 'not '}in {expression_text(data)}"
        return ""

    def _outcomes(
        self, statement: Mapping[str, Json], packet: Packet, network: NodeNetwork
    ) -> Iterator[_Outcome]:
        """Yield what a statement does to packets, by chance and by client. Raises _NotKnownError, _NoValueError."""
        ((kind, value),) = statement.items()
        match kind, value:
            case "match", {"op": str(op), "left": left, "right": right}:
                yield from self._compared(op, _components(left, packet, network), right, packet)
            case "vmap", {"key": key, "data": data}:
                for part, share, verdict in self._looked_up(data, _components(key, packet, network), packet):
                    if isinstance(verdict, Mapping):
                        yield _Outcome(part, share, effect=_verdict(verdict, part, share))
                    else:
                        yield _Outcome(part, share, missed=True)
            case (("limit" | "quota" | "ct count"), {**options}):
                yield _Outcome(packet, 1.0, missed=bool(options.get("inv")))
            case "set", {"op": str(op), "elem": element, "set": str(name), **rest}:
                over = '"inv":true' in msgspec.json.encode(rest).decode()
                yield _Outcome(self._added(op, element, name, packet), 1.0, missed=over)
            case "mangle", {"key": key, "value": to}:
                for part, share, written in self._values(to, packet, network):
                    yield _Outcome(_written(part, expression_text(key), written), share)
            case (("dnat" | "snat" | "masquerade" | "redirect"), _):
                yield from self._translated(kind, value, packet, network)
            case "notrack", _:
                yield _Outcome(msgspec.structs.replace(packet, states=(UNTRACKED,)), 1.0)
            case (("queue" | "tproxy" | "synproxy" | "fwd"), _):
                then = "it accepts" if kind == "queue" else "the packet continues"
                remark = f"{NOT_KNOWN} {statement_text(statement)} and assumes that {then}"
                end = RuleEnd.ACCEPT if kind == "queue" else None
                yield _Outcome(packet, 1.0, effect=RuleEffect(packet, end, remark=remark))
            case (("jump" | "goto" | "continue"), _):
                yield _Outcome(packet, 1.0, effect=_verdict(statement, packet, 1.0))
            case _ if kind in _ENDS:
                yield _Outcome(packet, 1.0, effect=_verdict(statement, packet, 1.0))
            case _ if kind in _NO_EFFECT or kind in _NO_EFFECT_ON_CONNECTIONS:
                yield _Outcome(packet, 1.0)
            case _:
                raise _NotKnownError(statement_text(statement))

    def _compared(
        self, op: str, key: Sequence[_Component], right: Json, packet: Packet
    ) -> Iterator[_Outcome]:
        """Yield the packets that meet a condition, and those that do not."""
        first = key[0]
        if op == "in":
            met = isinstance(first.value, int) and bool(first.value & _number(first.type, right))
            yield _Outcome(packet, 1.0, missed=not met)
            return
        seconds = self._sets.timeout(self._table, right)
        if seconds and op == "==" and [type(one.value) for one in key] == [_Sources]:
            yield from _remembered(AffinityList(f"{self._table} {right}", seconds), packet)
            return
        if op in ("<", ">", "<=", ">="):
            bound = _number(first.type, right)
            least = {"<": 0, "<=": 0, ">": bound + 1, ">=": bound}[op]
            most = {"<": bound - 1, "<=": bound}.get(op, 1 << 128)
            elements = _Elements([_Element((Range(least, most),), True)])
        else:
            elements = self._sets.elements(self._table, right, [one.type for one in key], is_map=False)
        for part, share, found in _parts(elements, key, packet):
            yield _Outcome(part, share, missed=(found is None) is not (op == "!="))

    def _added(self, op: str, element: Json, name: str, packet: Packet) -> Packet:
        """Return packets after their client is added to a set that remembers clients for a time."""
        seconds = self._sets.timeout(self._table, name)
        if packet.clients and seconds and op in ("add", "update") and "saddr" in expression_text(element):
            return msgspec.structs.replace(packet, remembered_in=f"{self._table} {name}")
        return packet

    def _looked_up(
        self, data: Json, key: Sequence[_Component], packet: Packet
    ) -> Iterator[tuple[Packet, float, Json]]:
        """Yield parts of packets, and what a map has for them; None for nothing."""
        elements = self._sets.elements(self._table, data, [one.type for one in key], is_map=True)
        for part, share, found in _parts(elements, key, packet):
            yield part, share, found.data if found else None

    def _values(
        self, expression: Json, packet: Packet, network: NodeNetwork
    ) -> Iterator[tuple[Packet, float, Json]]:
        """Yield parts of packets, and the value of an expression for each. Raises _NoValueError without one."""
        match expression:
            case {"map": {"key": key, "data": data}}:
                yield from self._looked_up(data, _components(key, packet, network), packet)
            case Mapping() if next(iter(expression), "") in (*_OPERATORS, "meta", "ct", "payload"):
                value = _component(expression, packet, network).value
                if not isinstance(value, int | str):
                    raise _NotKnownError(expression_text(expression))
                yield packet, 1.0, value
            case _:
                yield packet, 1.0, expression

    def _translated(self, kind: str, value: Json, packet: Packet, network: NodeNetwork) -> Iterator[_Outcome]:
        """Yield packets with another destination or source. An address or port that is not given stays."""
        options = value if isinstance(value, Mapping) else {}
        if "netmap" in expression_text(options.get("flags")):
            raise _NotKnownError(statement_text({kind: value}))
        for part, share, to in self._values(options.get("addr"), packet, network):
            for one, port_share, port in self._values(options.get("port"), part, network):
                if ("addr" in options and to is None) or ("port" in options and port is None):
                    yield _Outcome(one, share * port_share, missed=True)
                    continue
                address, port_there = to, port
                if isinstance(to, Mapping) and isinstance(pair := to.get("concat"), list):
                    address, port_there = pair
                if kind == "redirect":
                    address = _own_address(one, network)
                changed = _with_address(
                    one, kind in ("dnat", "redirect"), _lowest(address), _lowest(port_there)
                )
                chance = f"{percent(share * port_share)} of these packets " if share * port_share < 1 else ""
                to_text = address_and_port(changed.destination, changed.port)
                remark = f"{chance}to {to_text}" if kind in ("dnat", "redirect") else ""
                effect = RuleEffect(changed, RuleEnd.ACCEPT, remark=remark)
                yield _Outcome(one, share * port_share, effect=effect)


def _remembered(known: AffinityList, packet: Packet) -> Iterator[_Outcome]:
    """Yield the clients that a list of clients contains, and all as new ones."""
    if packet.recalled in (None, known):
        yield _Outcome(msgspec.structs.replace(packet, recalled=known), 1.0)
    if packet.recalled != known:
        yield _Outcome(packet, 1.0, missed=True)


def _reason(error: Exception) -> str:
    match error:
        case _NotKnownError():
            return f"{NOT_KNOWN} {error} and assumes no match"
        case _NoValueError():
            return str(error)
        case _:
            return f"cannot parse a value in the rule: {error}"


def _is_unknown_interface(component: _Component, packet: Packet) -> bool:
    """Return whether a part of a key is an interface that is not known; packets of the node itself come in by none."""
    return component.value == "" and not (packet.starts_here and component.what.startswith("incoming"))


def _components(expression: Json, packet: Packet, network: NodeNetwork) -> Sequence[_Component]:
    match expression:
        case {"concat": list(parts)}:
            return [_component(part, packet, network) for part in parts]
        case _:
            return [_component(expression, packet, network)]


def _parts(
    elements: _Elements, key: Sequence[_Component], packet: Packet
) -> Iterator[tuple[Packet, float, _Element | None]]:
    """Yield parts of packets, by client and by chance, and the element that each has. Raises _NotKnownError."""
    varying = [position for position, one in enumerate(key) if isinstance(one.value, _Sources | _Chance)]
    fixed = [one.value for one in key if isinstance(one.value, int | str)]
    if not varying:
        yield packet, 1.0, elements.find(fixed)
        return
    if len(varying) > 1:
        raise _NotKnownError(" . ".join(one.what for one in key))
    value = key[varying[0]].value
    candidates = [(one, one.parts[varying[0]]) for one in elements.find_all(fixed, varying[0])]
    if isinstance(value, _Chance):
        left = 1.0
        for element, part in candidates:
            among = intersection((value.numbers,), (part,)) if isinstance(part, Range) else ()
            share = sum(_size(one) for one in among) / _size(value.numbers)
            left -= share
            if share:
                yield packet, share, element
        if left > 1e-9:
            yield packet, left, elements.for_others
    elif isinstance(value, _Sources):
        others = packet.clients
        of_data: dict[int, tuple[_Element, list[Addresses]]] = {}
        for element, part in candidates:
            of_data.setdefault(id(element.data), (element, []))[1].append(value.named(part))
        for element, named in of_data.values():
            clients = intersection(packet.clients, union(named))
            others = subtract(others, clients)
            if clients:
                yield msgspec.structs.replace(packet, clients=clients), 1.0, element
        if others:
            yield msgspec.structs.replace(packet, clients=others), 1.0, elements.for_others


def _size(one: Range) -> int:
    return one.last - one.first + 1


def _verdict(verdict: Mapping[str, Json], packet: Packet, share: float) -> RuleEffect:
    remark = f"{percent(share)} of these packets: {statement_text(verdict)}" if share < 1 else ""
    match verdict:
        case {"jump": {"target": str(target)}}:
            return RuleEffect(packet, jump=target, remark=remark)
        case {"goto": {"target": str(target)}}:
            return RuleEffect(packet, jump=target, goto=True, remark=remark)
    return RuleEffect(packet, _ENDS.get(next(iter(verdict), "")), remark=remark)


def _written(packet: Packet, field: str, value: Json) -> Packet:
    """Return a packet after a rule writes a field. Raises _NotKnownError for those that other rules read."""
    if field == "meta mark":
        return msgspec.structs.replace(packet, mark=_number(_NUMBER, value) & _ALL_BITS)
    if field == "ct mark":
        return msgspec.structs.replace(packet, connection_mark=_number(_NUMBER, value) & _ALL_BITS)
    if field.endswith(_REWRITTEN):
        raise _NotKnownError(f"{field} set {expression_text(value)}")
    return packet


def _lowest(value: Json) -> Json:
    """Return the first of a range, or the value itself."""
    match value:
        case {"range": [first, _]}:
            return first
    return value


def _own_address(packet: Packet, network: NodeNetwork) -> str:
    """Return the address of this node to which it redirects a packet; with several addresses, this is a guess."""
    family = family_of(packet.destination)
    if packet.starts_here:
        return "127.0.0.1" if family is Family.IPV4 else "::1"
    own = sorted(address for address in network.addresses if family_of(address) is family)
    return packet.destination if packet.destination in own or not own else own[0]


def _with_address(packet: Packet, destination: bool, address: Json, port: Json) -> Packet:
    """Return a packet with another destination, or with another source. Raises ValueError."""
    if isinstance(address, str):
        number(address)
    elif address is not None:
        raise _NotKnownError(expression_text(address))
    if destination:
        return msgspec.structs.replace(
            packet,
            destination=address or packet.destination,
            port=port if isinstance(port, int) else packet.port,
            states=(*packet.states, DNAT),
        )
    return msgspec.structs.replace(packet, source=address or packet.source, states=(*packet.states, SNAT))


class _Sets:
    """The sets and maps of all tables. The elements of one are read when a packet first gets there."""

    def __init__(self, sets: Mapping[SetKey, NftSet]) -> None:
        self._sets = sets
        self._known: dict[tuple[object, ...], _Elements] = {}

    def timeout(self, table: str, data: Json) -> int:
        """Return for how many seconds elements stay in a set, 0 for ever."""
        found = self._sets.get(SetKey(table, data[1:])) if isinstance(data, str) else None
        return found.timeout if found else 0

    def elements(self, table: str, data: Json, types: Sequence[_Type], *, is_map: bool) -> _Elements:
        """Return the elements of a named or anonymous set or map whose keys have these types."""
        # An anonymous set belongs to a rule, which lives as long as this.
        case = (table, data if isinstance(data, str) else id(data), tuple(map(id, types)), is_map)
        if case not in self._known:
            self._known[case] = _Elements(list(self._read(table, data, types, is_map)))
        return self._known[case]

    def _read(self, table: str, data: Json, types: Sequence[_Type], is_map: bool) -> Iterator[_Element]:
        if isinstance(data, str) and data.startswith("@"):
            found = self._sets.get(SetKey(table, data[1:]))
            elements = found.elements if found else ()
        else:
            elements = anonymous_elements(data)
        for one in elements:
            key, value = one if is_map and isinstance(one, list) else (one, True)
            yield _Element(_key_parts(key, types), value)


def _key_parts(key: Json, types: Sequence[_Type]) -> tuple[_Part, ...]:
    match key:
        case "*":
            return ()
        case {"elem": {"val": element}}:
            return _key_parts(element, types)
        case {"concat": list(parts)}:
            return tuple(_part(type_, part) for type_, part in zip(types, parts, strict=True))
        case _:
            return (_part(types[0], key),)


class NftRules:
    """The tables of nftables for one family. A chain is compiled when a packet first gets there."""

    def __init__(self, ruleset: NftRuleset) -> None:
        self._chains = ruleset.chains
        self._sets = _Sets(ruleset.sets)
        self._compiled: dict[ChainKey, Sequence[CompiledNftRule]] = {}
        self._base: dict[str, list[BaseChain]] = {}
        for key, chain in ruleset.chains.items():
            if chain.hook:
                base = BaseChain(key, chain.priority, chain.kind == "nat", chain.drops)
                self._base.setdefault(chain.hook, []).append(base)

    def base_chains(self, hook: Hook) -> Sequence[BaseChain]:
        """Return the chains that packets enter at a hook."""
        return self._base.get(hook.value.lower(), ())

    def met(self, chain: ChainKey, _packet: Packet, /) -> Sequence[CompiledNftRule]:
        """Return the rules of a chain; none if the chain is missing."""
        if chain not in self._compiled:
            found = self._chains.get(chain)
            self._compiled[chain] = [
                CompiledNftRule(rule, self._sets, chain.table) for rule in (found.rules if found else ())
            ]
        return self._compiled[chain]

    def jump(self, chain: ChainKey, target: str) -> ChainKey | None:
        """Return the chain to which a rule of this chain with a target jumps; None if the target is no chain."""
        to = ChainKey(chain.table, target)
        return to if target and to in self._chains else None
