"""The text and the JSON document of `pykubeproxy diff --meaning`."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.meaning.addresses import Addresses, every_address, render_range, subtract, union
from pykubeproxy.inspect.meaning.clients import (
    Chances,
    ClientGroup,
    differing_groups,
    endpoints_of,
    everyone,
)
from pykubeproxy.inspect.meaning.outcomes import Destination, MeaningChange, Outcome
from pykubeproxy.inspect.routes import PacketVerdict
from pykubeproxy.objects import Family, address_and_port, family_of
from pykubeproxy.wording import SafeText, listed, percent, period, styled, text_of

# How many ranges of clients a line names.
_LISTED = 3
_COLORS = {"-": "red", "+": "green"}
VERDICTS = {
    PacketVerdict.DROP: "dropped",
    PacketVerdict.REJECT: "rejected",
    PacketVerdict.PASS: "not redirected",
}


def text(changes: Iterable[MeaningChange], before: str, after: str) -> SafeText:
    """Return what each group of clients gets instead, destination by destination; "" for no change."""
    lines: list[str] = []
    for (title, destination), group in groupby(changes, lambda it: (it.title, it.destination)):
        at = _destination(destination)
        lines.append(styled(f"{title} at {at}" if title else at, bold=True))
        for clients, differing in _by_lines(group):
            lines.append(f"  from {listed(clients)}")
            lines += [styled(f"    {line}", _COLORS[line[0]]) for line in differing]
    return text_of([f"- {before}", f"+ {after}", "", *lines] if lines else ())


def _by_lines(changes: Iterable[MeaningChange]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the differing lines with the names of all clients that have the same ones."""
    clients: dict[tuple[str, ...], list[str]] = {}
    for change in changes:
        groups = differing_groups(change)
        # An endpoint as its own client gets the same as others, masqueraded.
        shown = [it for it in groups if not it.endpoints_only] or groups
        for group in shown:
            clients.setdefault(tuple(_differing(group)), []).append(_named(change, group))
    return ((names, list(lines)) for lines, names in clients.items())


def _differing(group: ClientGroup) -> Iterator[str]:
    before, after = (_plain(it) for it in (group.before, group.after))
    if before == after:
        before, after = group.before, group.after
    old, new = (["".join(_words(*it)) for it in chances.items()] for chances in (before, after))
    yield from (f"- {line}" for line in sorted(old) if line not in new)
    yield from (f"+ {line}" for line in sorted(new) if line not in old)


def _plain(chances: Chances) -> Chances:
    """Return the outcomes without what only another policy of FORWARD would show."""
    return {msgspec.structs.replace(outcome, accepted=None): share for outcome, share in chances.items()}


def _words(outcome: Outcome, share: float) -> Iterator[str]:
    yield outcome.endpoint or VERDICTS[outcome.verdict]
    if share < 1:
        yield f" {percent(share)}"
    if outcome.masquerade:
        yield ", masqueraded"
    if outcome.accepted is not None and outcome.endpoint:
        yield ", accepted by KUBE-FORWARD" if outcome.accepted else ", not accepted by KUBE-FORWARD"
    for endpoint, seconds in outcome.affinity:
        to = "" if endpoint == outcome.endpoint else f" to {endpoint}"
        yield f", affinity{to} for {period(seconds)}"


def _named(change: MeaningChange, group: ClientGroup) -> str:
    """Name a group by its origin, or by networks; addresses that send nothing from there do not count."""
    if change.origin.on_node:
        return "this node"
    family = family_of(change.destination.address)
    senders = everyone(change)
    ignored = subtract(every_address(family), senders)
    if not group.endpoints_only:
        ignored = union((ignored, endpoints_of(change)))
    others = _filled(subtract(senders, union((group.clients, ignored))), ignored)
    elsewhere = f"interface {change.origin.interface}" if change.origin.interface else "elsewhere"
    if not others:
        return elsewhere
    among = _filled(group.clients, ignored)
    if len(others) < len(among):
        return f"{elsewhere} except {_ranges(family, others)}"
    return _ranges(family, among)


def _filled(addresses: Addresses, ignored: Addresses) -> Addresses:
    """Add the ignored ranges between two ranges of addresses."""
    first, last = {it.first for it in addresses}, {it.last for it in addresses}
    return union((addresses, tuple(it for it in ignored if it.first - 1 in last and it.last + 1 in first)))


def _ranges(family: Family, addresses: Addresses) -> str:
    return listed((render_range(family, it) for it in addresses), _LISTED)


def _destination(destination: Destination) -> str:
    at = address_and_port(destination.address, destination.port)
    return at if destination.protocol == "TCP" else f"{at} {destination.protocol}"


def document(changes: Sequence[MeaningChange], before: str, after: str) -> dict[str, object]:
    """The changes as a JSON document of version pykubeproxy/v1.

    {"apiVersion", "before", "after": the names of both sides, "different": bool,
     "differences": [{"service": "namespace/name:port", "" if unknown,
                      "protocol", "address", "port": the destination,
                      "from": "node"|"elsewhere", "interface": by which packets come in, "" for any other,
                      "clients": [address, network or "first-last"],
                      "before", "after": [{"verdict": "dnat"|"reject"|"drop"|"pass",
                                           "endpoint": "ip:port", "" without one, "probability",
                                           "masquerade": true|false,
                                           "accepted": true if a rule accepts the packet in FORWARD,
                                           "affinity": [{"endpoint", "seconds"}]}]}]}

    Keys may be added.
    """
    return {
        "apiVersion": API_VERSION,
        "before": before,
        "after": after,
        "different": bool(changes),
        "differences": [
            {
                "service": change.title,
                "protocol": change.destination.protocol,
                "address": change.destination.address,
                "port": change.destination.port,
                "from": "node" if change.origin.on_node else "elsewhere",
                "interface": change.origin.interface,
                "clients": [render_range(family_of(change.destination.address), it) for it in group.clients],
                "before": _outcomes(group.before),
                "after": _outcomes(group.after),
            }
            for change in changes
            for group in differing_groups(change)
        ],
    }


def _outcomes(chances: Chances) -> list[dict[str, object]]:
    found: list[dict[str, object]] = [
        {
            "verdict": outcome.verdict.value,
            "endpoint": outcome.endpoint,
            "probability": share,
            "masquerade": outcome.masquerade,
            "accepted": bool(outcome.accepted),
            "affinity": [
                {"endpoint": endpoint, "seconds": seconds} for endpoint, seconds in outcome.affinity
            ],
        }
        for outcome, share in chances.items()
    ]
    return sorted(found, key=lambda it: (str(it["endpoint"]), str(it["verdict"])))
