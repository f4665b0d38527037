"""Changes in words: first what is no single service's, then service by service."""

from collections.abc import Iterator, Sequence

from pykubeproxy.inspect.changes import Changes, PolicyChange, ServiceChange
from pykubeproxy.inspect.dump import EndpointView, ServiceView, Verdict
from pykubeproxy.inspect.forms import frontend_in_words, in_units, refusal
from pykubeproxy.inspect.frontends import Frontend
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.inspect.rule import read
from pykubeproxy.objects import address_and_port
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.difference import ChainDifference

# How many endpoints or chains a sentence names.
_NAMED = 5
_NO_LONGER = {
    Verdict.REJECT: "no longer refused",
    Verdict.DROP: "no longer dropped",
    Verdict.PASS: "led nowhere before",
}
# What stands in the tables whatever the services.
_ALL = frozenset((*skeleton.JUMPS, *skeleton.SHARED, *skeleton.FIXED))


def words(changes: Changes) -> Iterator[str]:
    """All changes, one sentence each; what is "new" is there after, what is "gone" before."""
    yield from _others(changes.others)
    if changes.branches:
        yield f"{_counted(len(changes.branches), 'chain')} on the way to services: other rules"
    if changes.strays:
        yield f"{_counted(len(changes.strays), 'chain')} gone that nothing leads to: {_some(changes.strays)}"
    for service in changes.services:
        yield from about(service)


def about(change: ServiceChange) -> Iterator[str]:
    """What changes for one service port."""
    protocol = "" if change.name.protocol == "TCP" else f" {change.name.protocol}"
    title = f"{change.name}{protocol}"
    if not change.policies:
        yield f"{title}: other rules, which lead to the same endpoints as before"
    match change.present:
        case (False, True):
            title += " is new"
        case (True, False):
            title += " is gone"
    several = len(change.policies) > 1 or any(it.policy is Policy.LOCAL for it in change.policies)
    for policy in change.policies:
        under = f" (policy {policy.policy.value})" if several else ""
        yield f"{title}{under}: {'; '.join(_of_policy(policy, change.present))}"


def _of_policy(change: PolicyChange, present: tuple[bool, bool]) -> Iterator[str]:
    before, after = change.before, change.after
    if before is None or after is None:
        view = before or after
        assert view is not None, "a change has a before or an after"
        if all(present):
            yield "new" if after else "gone"
        yield from _in_full(view)
        return
    yield from _of_endpoints(change, before, after)
    yield from _of_frontends(before.frontends, after.frontends, "")
    yield from _of_frontends(before.from_this_node, after.from_this_node, " for this node and its pods")
    yield from _of_terms(before, after)


def _in_full(view: ServiceView) -> Iterator[str]:
    """A policy that is there only before or only after."""
    yield ", ".join(map(frontend_in_words, view.frontends or view.from_this_node))
    if view.verdict is not Verdict.DNAT:
        yield refusal(view)
    if view.endpoints:
        yield f"{_counted(len(view.endpoints), 'endpoint')}: {_named(view.endpoints)}"


def _of_endpoints(change: PolicyChange, before: ServiceView, after: ServiceView) -> Iterator[str]:
    for state, endpoints in (("gone", change.gone), ("new", change.new)):
        if endpoints:
            yield f"{_counted(len(endpoints), 'endpoint')} {state}: {_named(endpoints)}"
    if change.reweighted:
        pairs = {(_percent(old.share), _percent(new.share)) for old, new in change.reweighted}
        others = " of the others" if change.gone or change.new else ""
        if len(pairs) == 1:
            yield "share{} {} → {}".format(others, *next(iter(pairs)))
        else:
            yield f"other shares for {_named([new for _, new in change.reweighted])}"
    if before.verdict is not after.verdict:
        if before.verdict is not Verdict.DNAT:
            yield _NO_LONGER[before.verdict]
        if after.verdict is not Verdict.DNAT:
            yield refusal(after)


def _of_frontends(before: Sequence[Frontend], after: Sequence[Frontend], where: str) -> Iterator[str]:
    for state, ways, others in (("gone", before, after), ("new", after, before)):
        if only := [frontend_in_words(way) for way in ways if way not in others]:
            yield f"{', '.join(only)} {state}{where}"


def _of_terms(before: ServiceView, after: ServiceView) -> Iterator[str]:
    if before.affinity_seconds != after.affinity_seconds:
        kept = [in_units(it.affinity_seconds) if it.affinity_seconds else "none" for it in (before, after)]
        yield f"session affinity {kept[0]} → {kept[1]}"
    if before.source_ranges != after.source_ranges:
        ranges = [", ".join(it.source_ranges) or "everybody" for it in (before, after)]
        yield f"load balancer open to {ranges[0]} → {ranges[1]}"
    if before.health_check_node_port != after.health_check_node_port:
        ports = [it.health_check_node_port or "none" for it in (before, after)]
        yield f"health check node port {ports[0]} → {ports[1]}"


def _others(differences: Sequence[ChainDifference]) -> Iterator[str]:
    """Jumps and chains that are there in one state only, a sentence for each table, then the rest chain by chain."""
    new = {it.key for it in differences if not it.before}
    if new.issuperset(_ALL):
        yield "all jumps and all chains that services share are new: no proxy has written its rules here"
        differences = [it for it in differences if it.key not in _ALL]
    found: dict[tuple[str, str], list[str]] = {}
    for it in differences:
        table, chain = it.key
        if it.key in skeleton.JUMPS:
            for state, rules in (("gone", it.gone), ("new", it.new)):
                for rule in rules:
                    found.setdefault((table, f"jump {state}"), []).append(f"{chain} to {read(rule).target}")
        elif it.before is None or it.after is None:
            state = "new" if it.before is None else "gone"
            found.setdefault((table, f"chain {state}"), []).append(chain)
        else:
            found.setdefault((f"{table}, {chain}", ""), []).append(_of_rules(it))
    for (where, what), those in found.items():
        noun, _, state = what.partition(" ")
        prefix = f"{_counted(len(those), noun)} {state}: " if what else ""
        yield f"table {where}: {prefix}{', '.join(those)}"


def _of_rules(it: ChainDifference) -> str:
    states = ((it.gone, "gone"), (it.new, "new"))
    parts = [f"{_counted(len(rules), 'rule')} {state}" for rules, state in states if rules]
    return ", ".join(parts) or "the same rules in another order"


def _named(endpoints: Sequence[EndpointView]) -> str:
    return _some([address_and_port(it.address, it.port) for it in endpoints])


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
