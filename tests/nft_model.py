"""An independent evaluator of kube-proxy's tables of nftables: the outcomes of one packet and their probabilities.

It shares no code with the walker. It knows only the expressions that kube-proxy writes, and raises for all others.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any

import msgspec

from pykubeproxy.rules.nft_list import NftRuleset, SetKey
from pykubeproxy.rules.ruleset import ChainKey


class Packet(msgspec.Struct, frozen=True):
    """The first packet of a connection. `remembered` are the sets with a timeout that have its source."""

    source: str
    destination: str
    protocol: str
    port: int
    interface: str = "eth0"
    mark: int = 0
    translated: bool = False
    masqueraded: bool = False
    remembered: frozenset[str] = frozenset()


class Outcome(msgspec.Struct, frozen=True):
    """`verdict` is "drop", "reject", "to ADDRESS PORT", or "pass"."""

    verdict: str
    masqueraded: bool = False
    remembered: frozenset[str] = frozenset()


class _Next(msgspec.Struct, frozen=True):
    """What a rule leaves of a packet: `end` is how it leaves the chain or base chain, "" to go on."""

    packet: Packet
    share: float
    end: str = ""


class Model:
    """Sends packets through the tables of a node with these addresses."""

    def __init__(self, ruleset: NftRuleset, own: Collection[str]) -> None:
        self._ruleset = ruleset
        self._own = own

    def outcomes(self, packet: Packet) -> Mapping[Outcome, float]:
        found: dict[Outcome, float] = defaultdict(float)
        for end, share in self._all(packet):
            found[end] += share
        return {outcome: round(share, 6) for outcome, share in found.items()}

    def _all(self, packet: Packet) -> Iterator[tuple[Outcome, float]]:
        first = "output" if self._is_own(packet.source) else "prerouting"
        waiting: list[tuple[Packet, float, tuple[str, ...]]] = [(packet, 1.0, (first,))]
        while waiting:
            one, share, hooks = waiting.pop()
            if not hooks:
                where = f"to {one.destination} {one.port}" if one.translated else "pass"
                yield Outcome(where, one.masqueraded, one.remembered), share
                continue
            for left in self._hook(hooks[0], one):
                part = share * left.share
                if left.end in ("drop", "reject"):
                    yield Outcome(left.end), part
                else:
                    waiting.append((left.packet, part, hooks[1:] or self._after(hooks[0], left.packet)))

    def _after(self, hook: str, packet: Packet) -> tuple[str, ...]:
        own = self._is_own(packet.destination)
        match hook:
            case "prerouting":
                return ("input",) if own else ("forward",)
            case "forward" | "output":
                return ("postrouting",)
            case "postrouting" if own and self._is_own(packet.source):
                return ("input",)
        return ()

    def _is_own(self, address: str) -> bool:
        return address in self._own or ip_address(address).is_loopback

    def _hook(self, hook: str, packet: Packet) -> Iterator[_Next]:
        chains = [(chain.priority, key) for key, chain in self._ruleset.chains.items() if chain.hook == hook]
        yield from self._through([key for _, key in sorted(chains)], packet)

    def _through(self, chains: Sequence[ChainKey], packet: Packet) -> Iterator[_Next]:
        if not chains:
            yield _Next(packet, 1)
            return
        for left in self._chain(chains[0], packet):
            if left.end in ("drop", "reject"):
                yield left
                continue
            for later in self._through(chains[1:], left.packet):
                yield msgspec.structs.replace(later, share=later.share * left.share)

    def _chain(self, key: ChainKey, packet: Packet) -> Iterator[_Next]:
        """Yield what leaves a chain; `end` is "" for packets that come back from it."""
        waiting = [(packet, 1.0, 0)]
        rules = self._ruleset.chains[key].rules
        while waiting:
            one, share, position = waiting.pop()
            if position == len(rules):
                yield _Next(one, share)
                continue
            for left in self._rule(key.table, rules[position].statements, one):
                part = share * left.share
                if left.end:
                    yield _Next(left.packet, part, "" if left.end == "return" else left.end)
                else:
                    waiting.append((left.packet, part, position + 1))

    def _rule(self, table: str, statements: Sequence[Any], packet: Packet) -> Iterator[_Next]:
        if not statements:
            yield _Next(packet, 1)
            return
        ((kind, value),) = statements[0].items()
        rest = statements[1:]
        match kind:
            case "match":
                met = self._meets(table, value, packet)
                yield from self._rule(table, rest, packet) if met else [_Next(packet, 1)]
            case "vmap":
                for share, verdict in self._looked_up(table, value["key"], value["data"], packet):
                    ends = [_Next(packet, 1)] if verdict is None else self._verdict(table, verdict, packet)
                    for left in ends:
                        yield msgspec.structs.replace(left, share=left.share * share)
            case "mangle":
                assert value["key"] == {"meta": {"key": "mark"}}
                marked = msgspec.structs.replace(packet, mark=self._value(value["value"], packet))
                yield from self._rule(table, rest, marked)
            case "dnat":
                for share, to in self._targets(table, value, packet):
                    sent = msgspec.structs.replace(packet, destination=to[0], port=to[1], translated=True)
                    yield _Next(sent, share, "accept")
            case "masquerade":
                yield _Next(msgspec.structs.replace(packet, masqueraded=True), 1, "accept")
            case "set":
                known = packet.remembered | {value["set"]}
                yield from self._rule(table, rest, msgspec.structs.replace(packet, remembered=known))
            case _:
                yield from self._verdict(table, statements[0], packet)

    def _verdict(self, table: str, verdict: Mapping[str, Any], packet: Packet) -> Iterator[_Next]:
        ((kind, value),) = verdict.items()
        if kind in ("jump", "goto"):
            for left in self._chain(ChainKey(table, value["target"]), packet):
                end = left.end or ("return" if kind == "goto" else "")
                yield msgspec.structs.replace(left, end=end)
        else:
            assert kind in ("drop", "reject", "accept", "return"), kind
            yield _Next(packet, 1, kind)

    def _targets(
        self, table: str, value: Mapping[str, Any], packet: Packet
    ) -> Iterator[tuple[float, tuple[str, int]]]:
        if isinstance(value["addr"], str):
            yield 1, (value["addr"], value["port"])
            return
        choice = value["addr"]["map"]
        for share, to in self._looked_up(table, choice["key"], choice["data"], packet):
            assert to is not None, "kube-proxy's maps of endpoints have no holes"
            address, port = to["concat"]
            yield share, (address, port)

    def _looked_up(self, table: str, key: Any, data: Any, packet: Packet) -> Iterator[tuple[float, Any]]:
        if isinstance(data, str):
            pairs: Sequence[Any] = self._ruleset.sets[SetKey(table, data[1:])].elements
        else:
            pairs = data["set"]
        found = {str(_plain(one)): to for one, to in pairs}
        if "numgen" in key:
            mod = key["numgen"]["mod"]
            for number in range(mod):
                yield 1 / mod, found.get(str(number))
        else:
            yield 1, found.get(str(self._value(key, packet)))

    def _meets(self, table: str, match: Mapping[str, Any], packet: Packet) -> bool:
        left, right = self._value(match["left"], packet), match["right"]
        if isinstance(right, str) and right.startswith("@"):
            one = self._ruleset.sets[SetKey(table, right[1:])]
            known = any(_has(element, left) for element in one.elements)
            met = right in packet.remembered if one.timeout else known
        else:
            elements = right["set"] if isinstance(right, dict) and "set" in right else [right]
            met = any(_has(element, left) for element in elements)
        return met is (match["op"] != "!=")

    def _value(self, expression: Any, packet: Packet) -> Any:
        match expression:
            case {"concat": parts}:
                return {"concat": [self._value(part, packet) for part in parts]}
            case {"payload": {"field": field}}:
                return {"daddr": packet.destination, "saddr": packet.source, "dport": packet.port}[field]
            case {"meta": {"key": key}}:
                values = {"l4proto": packet.protocol, "mark": packet.mark, "iifname": packet.interface}
                return values[key]
            case {"ct": {"key": "state"}}:
                return "new"
            case {"ct": {"key": "status"}}:
                return "dnat" if packet.translated else ""
            case {"fib": {"result": "type", "flags": [flag]}}:
                own = self._is_own(packet.source if flag == "saddr" else packet.destination)
                return "local" if own else "unicast"
            case {"|": [one, other]}:
                return self._value(one, packet) | self._value(other, packet)
            case {"&": [one, other]}:
                return self._value(one, packet) & self._value(other, packet)
            case {"^": [one, other]}:
                return self._value(one, packet) ^ self._value(other, packet)
            case int():
                return expression
        raise AssertionError(expression)


def _plain(element: Any) -> Any:
    return _plain(element["elem"]["val"]) if isinstance(element, dict) and "elem" in element else element


def _has(element: Any, value: Any) -> bool:
    element = _plain(element)
    match element:
        case {"prefix": {"addr": address, "len": length}}:
            return ip_address(value) in ip_network(f"{address}/{length}")
        case str() if isinstance(value, int):
            return int(element, 0) == value
    return bool(element == value)
