"""The sentences, the unified diff and the JSON document of `pykubeproxy diff`."""

import difflib
from collections.abc import Iterable, Iterator, Sequence

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.diff.model import Changes, PolicyChange, ServiceChange
from pykubeproxy.inspect.dump.model import EndpointView, ServiceView
from pykubeproxy.inspect.dump.render import open_to, rejection
from pykubeproxy.inspect.render_json import port_entry, rounded
from pykubeproxy.inspect.routes import PacketVerdict, Policy
from pykubeproxy.objects import address_and_port
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.difference import ChainDifference
from pykubeproxy.rules.parse import parse_rule
from pykubeproxy.services.frontend import Frontend
from pykubeproxy.wording import (
    SafeText,
    counted,
    listed,
    percent,
    period,
    plural,
    styled,
    text_of,
    tied,
    untied,
    wrapped,
)

# How many endpoints or chains a sentence lists.
_LISTED = 5
# How many unchanged rules a unified diff shows around changed ones.
_CONTEXT = 3
_COLORS = {"+": "green", "-": "red", "@": "cyan"}
_NO_LONGER = {
    PacketVerdict.REJECT: "no longer rejected",
    PacketVerdict.DROP: "no longer dropped",
    PacketVerdict.PASS: "no longer passed on",
}
# Present in the tables whatever the services.
_ALWAYS = frozenset((*skeleton.JUMPS, *skeleton.SHARED, *skeleton.FIXED))


def text(changes: Sequence[Changes], before: str, after: str) -> SafeText:
    """Return the changes as sentences in 80 columns; "" for none. `before` and `after` name the sides."""
    families = []
    for family in changes:
        if family.chains:
            title = styled(f"{family.family.value}: {before} → {after}", bold=True)
            lines = [line for sentence in sentences(family) for line in wrapped(sentence, "  ", "    ")]
            families.append([title, *lines])
    return text_of(*families)


def unified(changes: Sequence[Changes], before: str, after: str) -> SafeText:
    """Return the changes as a unified diff, chain by chain; "" for none."""
    return text_of(
        line
        for family in changes
        if family.chains
        for line in (
            styled(f"--- {before}, {family.family.value}", bold=True),
            styled(f"+++ {after}, {family.family.value}", bold=True),
            *(line for chain in family.chains for line in _hunks(chain)),
        )
    )


def sentences(changes: Changes) -> Iterator[str]:
    """Yield one sentence per change: first jumps and shared chains, then each service."""
    yield from _others(changes.others)
    if changes.branches:
        yield f"{counted(len(changes.branches), 'chain')} of the dispatch tree: different rules"
    if changes.unreferenced:
        number = len(changes.unreferenced)
        yield f"{number} unreferenced {plural(number, 'chain')} removed: {listed(changes.unreferenced, _LISTED)}"
    for service in changes.services:
        yield from service_sentences(service)


def service_sentences(change: ServiceChange) -> Iterator[str]:
    """Yield the changes of one service port."""
    protocol = "" if change.name.protocol == "TCP" else f" {change.name.protocol}"
    title = f"{change.name}{protocol}"
    if not change.policies:
        yield f"{title}: different rules for the same endpoints"
    match change.present:
        case (False, True):
            title += " added"
        case (True, False):
            title += " removed"
    several = len(change.policies) > 1 or any(one.policy is Policy.LOCAL for one in change.policies)
    for policy in change.policies:
        under = f" (policy {policy.policy.value})" if several else ""
        yield f"{title}{under}: {'; '.join(_policy(policy, change.present))}"


def _policy(change: PolicyChange, present: tuple[bool, bool]) -> Iterator[str]:
    before, after = change.before, change.after
    if before is None or after is None:
        view = before or after
        assert view is not None, "a change has a before or an after"
        if all(present):
            yield "added" if after else "removed"
        yield ", ".join(tied(str(frontend)) for frontend in view.frontends or view.from_this_node)
        if view.verdict is not PacketVerdict.DNAT:
            yield rejection(view)
        if view.endpoints:
            yield f"{counted(len(view.endpoints), 'endpoint')}: {_endpoints(view.endpoints)}"
        return
    yield from _endpoint_changes(change, before, after)
    yield from _frontend_changes(before.frontends, after.frontends, "")
    yield from _frontend_changes(before.from_this_node, after.from_this_node, " for this node and its pods")
    yield from _setting_changes(before, after)


def _endpoint_changes(change: PolicyChange, before: ServiceView, after: ServiceView) -> Iterator[str]:
    for state, endpoints in (("removed", change.removed), ("added", change.added)):
        if endpoints:
            yield f"{counted(len(endpoints), 'endpoint')} {state}: {_endpoints(endpoints)}"
    if change.reweighted:
        pairs = {(percent(old.share), percent(new.share)) for old, new in change.reweighted}
        others = " of the others" if change.removed or change.added else ""
        if len(pairs) == 1:
            yield "share{} {} → {}".format(others, *next(iter(pairs)))
        else:
            yield f"different shares for {_endpoints([new for _, new in change.reweighted])}"
    if before.verdict is not after.verdict:
        if before.verdict is not PacketVerdict.DNAT:
            yield _NO_LONGER[before.verdict]
        if after.verdict is not PacketVerdict.DNAT:
            yield rejection(after)


def _frontend_changes(before: Sequence[Frontend], after: Sequence[Frontend], where: str) -> Iterator[str]:
    for state, some, others in (("removed", before, after), ("added", after, before)):
        if only := [tied(str(frontend)) for frontend in some if frontend not in others]:
            yield f"{', '.join(only)} {state}{where}"


def _setting_changes(before: ServiceView, after: ServiceView) -> Iterator[str]:
    sides = (before, after)
    if before.affinity_seconds != after.affinity_seconds:
        kept = [period(view.affinity_seconds) if view.affinity_seconds else "none" for view in sides]
        yield f"session affinity {kept[0]} → {kept[1]}"
    if before.source_ranges != after.source_ranges:
        ranges = [open_to(view.source_ranges) for view in sides]
        yield f"load balancer open to {ranges[0]} → {ranges[1]}"
    if before.health_check_node_port != after.health_check_node_port:
        ports = [view.health_check_node_port or "none" for view in sides]
        yield f"health check node port {ports[0]} → {ports[1]}"


def _others(differences: Sequence[ChainDifference]) -> Iterator[str]:
    """Yield one sentence per table for jumps and whole chains, then one per chain with other rules."""
    if {chain.key for chain in differences if not chain.before} >= _ALWAYS:
        yield "all jumps and shared chains added: the tables have no rules of a service proxy"
        differences = [chain for chain in differences if chain.key not in _ALWAYS]
    found: dict[tuple[str, str, str], list[str]] = {}
    for difference in differences:
        table, chain = difference.key
        if difference.key in skeleton.JUMPS:
            for state, rules in (("removed", difference.gone), ("added", difference.new)):
                for rule in rules:
                    jump = f"{chain} to {parse_rule(rule).target}"
                    found.setdefault((table, "jump", state), []).append(jump)
        elif difference.before is None or difference.after is None:
            state = "added" if difference.before is None else "removed"
            found.setdefault((table, "chain", state), []).append(chain)
        else:
            found[f"{table}, {chain}", "", ""] = [_rules(difference)]
    for (where, noun, state), names in found.items():
        prefix = f"{counted(len(names), noun)} {state}: " if noun else ""
        yield f"table {where}: {prefix}{', '.join(names)}"


def _rules(difference: ChainDifference) -> str:
    states = ((difference.gone, "removed"), (difference.new, "added"))
    parts = [f"{counted(len(rules), 'rule')} {state}" for rules, state in states if rules]
    return ", ".join(parts) or "the same rules in another order"


def _endpoints(endpoints: Sequence[EndpointView]) -> str:
    return listed((address_and_port(one.address, one.port) for one in endpoints), _LISTED)


def _hunks(chain: ChainDifference) -> Iterator[str]:
    """Yield a chain's part of a unified diff; positions are those of rules in the chain."""
    state = " (added)" if chain.before is None else " (removed)" if chain.after is None else ""
    title = f"{chain.key.table} {chain.key.chain}{state}"
    before, after = chain.before or (), chain.after or ()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    groups = [*matcher.get_grouped_opcodes(_CONTEXT)]
    if not groups:
        yield _colored(f"@@ {title} @@")
    for group in groups:
        old, new = _range(group[0][1], group[-1][2]), _range(group[0][3], group[-1][4])
        yield _colored(f"@@ -{old} +{new} @@ {title}")
        for kind, start, end, new_start, new_end in group:
            if kind == "equal":
                yield from (f" {rule}" for rule in before[start:end])
            else:
                yield from (_colored(f"-{rule}") for rule in before[start:end])
                yield from (_colored(f"+{rule}") for rule in after[new_start:new_end])


def _range(start: int, end: int) -> str:
    """Return the start, from 1, and the length; an empty range has the position before it."""
    return f"{start + 1 if end > start else start},{end - start}"


def _colored(line: str) -> str:
    return styled(line, _COLORS[line[0]])


def document(changes: Sequence[Changes], before: str, after: str) -> dict[str, object]:
    """The changes as a JSON document of version pykubeproxy/v1.

    {"apiVersion", "before", "after": the names of both sides, "different": bool,
     "services": [{"namespace", "name", "port", "protocol", "family", "change": "added", "removed" or "changed",
      "policies": [{"policy", "verdictBefore", "verdictAfter": "dnat", "reject", "drop", "pass" or null,
        "endpointsRemoved", "endpointsAdded": [{"address", "port", "share": 0 to 1}],
        "sharesChanged": [{"address", "port", "before", "after"}]}],
      "messages": [sentence]}],
     "chains": [{"family", "table", "chain", "change", "removed": [rule], "added": [rule]}],
     "messages": [sentence], with those about services}

    If a changed service has empty "policies", its new rules are for the same endpoints. If a changed chain has empty
    "removed" and "added", its rules are in another order, and packets may go elsewhere. Keys may be added.
    """
    return {
        "apiVersion": API_VERSION,
        "before": before,
        "after": after,
        "different": any(family.chains for family in changes),
        "services": [
            {**_service_entry(service), "family": family.family.value}
            for family in changes
            for service in family.services
        ],
        "chains": [
            {"family": family.family.value, **_chain_entry(chain)}
            for family in changes
            for chain in family.chains
        ],
        "messages": [untied(sentence) for family in changes for sentence in sentences(family)],
    }


def _service_entry(change: ServiceChange) -> dict[str, object]:
    return {
        **port_entry(change.name),
        "change": _state(*change.present),
        "policies": [_policy_entry(policy) for policy in change.policies],
        "messages": [untied(sentence) for sentence in service_sentences(change)],
    }


def _policy_entry(change: PolicyChange) -> dict[str, object]:
    return {
        "policy": change.policy.value,
        "verdictBefore": change.before and change.before.verdict.value,
        "verdictAfter": change.after and change.after.verdict.value,
        "endpointsRemoved": _endpoint_entries(change.removed),
        "endpointsAdded": _endpoint_entries(change.added),
        "sharesChanged": [
            {
                "address": old.address,
                "port": old.port,
                "before": rounded(old.share),
                "after": rounded(new.share),
            }
            for old, new in change.reweighted
        ],
    }


def _endpoint_entries(endpoints: Iterable[EndpointView]) -> list[dict[str, object]]:
    return [{"address": one.address, "port": one.port, "share": rounded(one.share)} for one in endpoints]


def _chain_entry(chain: ChainDifference) -> dict[str, object]:
    return {
        **chain.key._asdict(),
        "change": _state(chain.before is not None, chain.after is not None),
        "removed": list(chain.gone),
        "added": list(chain.new),
    }


def _state(before: bool, after: bool) -> str:
    return "changed" if before and after else "added" if after else "removed"
