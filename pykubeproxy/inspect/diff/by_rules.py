"""Differences by rules: the chains of two Rulesets that differ, as changes of service ports."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pykubeproxy.inspect.dump.model import EndpointView, FrontendRules, ServiceView, find_ports, port_views
from pykubeproxy.inspect.dump.report import open_to, rejection
from pykubeproxy.inspect.routes import PacketVerdict, Policy
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.objects import Family, Protocol, address_and_port
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.difference import ChainDifference, difference
from pykubeproxy.rules.iptables_save import parse_rule
from pykubeproxy.rules.ownership import is_owned
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.ports import Frontend, PortName
from pykubeproxy.wording import (
    SafeText,
    counted,
    listed,
    percent,
    period,
    plural,
    styled,
    text_of,
)

# iptables keeps probabilities in 31 bits; smaller changes are noise.
_NOISE = 1e-6
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
# Present in the tables with or without services.
_ALWAYS = frozenset((*skeleton.JUMPS, *skeleton.SHARED, *skeleton.FIXED))


class SharedEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    """An endpoint with its share of new connections, 0 to 1."""

    address: str
    port: int
    share: float


class ChangedShare(msgspec.Struct, frozen=True, rename="camel"):
    """An endpoint whose share of new connections differs.

    - `before`: its share on the side `before` of the node, 0 to 1
    - `after`: its share on the side `after`
    """

    address: str
    port: int
    before: float
    after: float


class PolicyDifference(msgspec.Struct, frozen=True, rename="camel"):
    """The difference of a service port under one policy.

    - `verdict_before`, `verdict_after`: what rules do with new connections; null without frontends under this policy
    - `endpoints_removed`: those on the side `before` of the node only
    - `endpoints_added`: those on the side `after` only
    - `shares_changed`: those of both sides whose shares differ
    """

    policy: Policy
    verdict_before: PacketVerdict | None
    verdict_after: PacketVerdict | None
    endpoints_removed: tuple[SharedEndpoint, ...]
    endpoints_added: tuple[SharedEndpoint, ...]
    shares_changed: tuple[ChangedShare, ...]


class PortDifference(msgspec.Struct, frozen=True, rename="camel"):
    """The difference of one service port in one family.

    - `change`: "added", "removed" or "changed"
    - `policies`: empty if the rules differ, but are for the same endpoints
    - `messages`: the difference in sentences
    """

    namespace: str
    name: str
    port: str
    protocol: str
    family: Family
    change: str
    policies: tuple[PolicyDifference, ...]
    messages: tuple[str, ...]


class ChainRulesDifference(msgspec.Struct, frozen=True, rename="camel"):
    """A chain that differs.

    - `change`: "added", "removed" or "changed"
    - `removed`: rules on the side `before` of the node only
    - `added`: rules on the side `after` only; if both are empty, only the order differs
    """

    family: Family
    table: str
    chain: str
    change: str
    removed: tuple[str, ...]
    added: tuple[str, ...]


class RulesDifference(msgspec.Struct, frozen=True, rename="camel"):
    """How the rules of a node differ as text.

    - `families`: the sentences by family, only for those that differ
    - `messages`: all sentences, with those about service ports
    """

    ports: tuple[PortDifference, ...]
    chains: tuple[ChainRulesDifference, ...]
    families: Mapping[Family, tuple[str, ...]]
    messages: tuple[str, ...]


class RuleChanges(msgspec.Struct, frozen=True):
    """The differences between two states of one family's tables.

    - `chains`: every chain that differs
    - `ports`: the service ports that change
    - `messages`: sentences about both, those about service ports last
    """

    family: Family
    chains: tuple[ChainDifference, ...] = ()
    ports: tuple[PortDifference, ...] = ()
    messages: tuple[str, ...] = ()


def compare_rules(before: Ruleset, after: Ruleset) -> RuleChanges:
    """Compare two Rulesets of one family that hold only the chains and rules to compare."""
    chains = difference(before, after)
    if not chains:
        return RuleChanges(after.family)
    sides = [find_ports(ruleset, ServiceFilter()) for ruleset in (before, after)]
    own = {chain.key.chain for chain in chains if is_owned(chain.key)}
    jumps = tuple(_jumps(before, after))
    above = _reachable(own, ((target, chain) for chain, target in jumps))
    reachable = _reachable({key.chain for key in skeleton.SHARED}, jumps)
    targets = {rule.target for ports in sides for port in ports.values() for rule in port.serving}
    branches = (own & reachable) - _reachable(targets, jumps)
    ports = tuple(_ports(_affected(sides, chains, above), sides, (before, after)))
    messages = [*_other_sentences(tuple(_others(chains)))]
    if number := sum(chain.key.chain in branches and _branches_differ(chain) for chain in chains):
        messages.append(f"{counted(number, 'chain')} of the dispatch tree: different rules")
    if unreferenced := sorted(own - reachable):
        number = len(unreferenced)
        messages.append(
            f"{number} unreferenced {plural(number, 'chain')} removed: {listed(unreferenced, _LISTED)}"
        )
    messages += (message for port in ports for message in port.messages)
    return RuleChanges(after.family, chains, ports, tuple(messages))


def _affected(
    sides: Sequence[Mapping[PortName, FrontendRules]], chains: Sequence[ChainDifference], above: set[str]
) -> list[PortName]:
    """Return the service ports with a rule in a differing chain, or with a path to one."""
    titles = {title for chain in _frontend_rules(chains) for title in _titles(chain)}
    return [
        name
        for name in sorted({**sides[0], **sides[1]})
        if (str(name), name.protocol) in titles
        or any(rule.target in above for ports in sides if name in ports for rule in ports[name].serving)
    ]


def _ports(
    affected: Sequence[PortName],
    sides: Sequence[Mapping[PortName, FrontendRules]],
    rulesets: Sequence[Ruleset],
) -> Iterator[PortDifference]:
    views: list[dict[tuple[PortName, Policy], ServiceView]] = []
    for ports, ruleset in zip(sides, rulesets, strict=True):
        some = {name: ports[name] for name in affected if name in ports}
        views.append({(view.name, view.policy): view for view in port_views(ruleset, {}, some)})
    for name in affected:
        pairs = {policy: (views[0].get((name, policy)), views[1].get((name, policy))) for policy in Policy}
        differences = {policy: _policy_difference(policy, *pair) for policy, pair in pairs.items()}
        found = [(one, *pairs[policy]) for policy, one in differences.items() if one]
        change = _state(name in sides[0], name in sides[1])
        yield PortDifference(
            name.namespace,
            name.service,
            name.port,
            name.protocol,
            rulesets[0].family,
            change,
            tuple(one for one, _, _ in found),
            tuple(_port_sentences(name, change, found)),
        )


def _policy_difference(
    policy: Policy, before: ServiceView | None, after: ServiceView | None
) -> PolicyDifference | None:
    """Return what differs under one policy; None for nothing."""
    old, new = _endpoints(before), _endpoints(after)
    found = PolicyDifference(
        policy,
        before.verdict if before else None,
        after.verdict if after else None,
        tuple(SharedEndpoint(*key, share) for key, share in old.items() if key not in new),
        tuple(SharedEndpoint(*key, share) for key, share in new.items() if key not in old),
        tuple(
            ChangedShare(*key, share, new[key])
            for key, share in old.items()
            if key in new and abs(share - new[key]) > _NOISE
        ),
    )
    if before is None or after is None:
        return None if before is after else found
    bare = [msgspec.structs.replace(view, endpoints=()) for view in (before, after)]
    differs = bare[0] != bare[1] or found.endpoints_removed or found.endpoints_added or found.shares_changed
    return found if differs else None


def _others(chains: Iterable[ChainDifference]) -> Iterator[ChainDifference]:
    for chain in chains:
        if chain.key in skeleton.SHARED:
            bare = ChainDifference(chain.key, _untitled(chain.before), _untitled(chain.after))
            if chain.before and chain.after and sorted(chain.before) == sorted(chain.after):
                yield chain
            elif bare.before != bare.after:
                yield bare
        elif not is_owned(chain.key):
            yield chain


def _untitled(rules: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if rules is None else tuple(rule for rule in rules if not parse_rule(rule).title)


def _branches_differ(chain: ChainDifference) -> bool:
    """Return whether a chain of the dispatch tree differs in more than rules of single services."""
    rules = (*chain.gone, *chain.new)
    return not rules or any(not parse_rule(rule).title for rule in rules)


def _frontend_rules(chains: Sequence[ChainDifference]) -> Iterator[ChainDifference]:
    """Yield the chains of each table as one: in a dispatch tree, the same rules stand in other chains."""
    for key in (skeleton.NAT_SERVICES, skeleton.FILTER_SERVICES):
        some = [chain for chain in chains if chain.key.table == key.table]
        before = tuple(rule for chain in some for rule in chain.before or ())
        after = tuple(rule for chain in some for rule in chain.after or ())
        yield ChainDifference(key, before, after)


def _titles(chain: ChainDifference) -> Iterator[tuple[str, str]]:
    """Yield the service ports whose frontends have rules that differ, as (name, protocol)."""
    for text in set(chain.before or ()) ^ set(chain.after or ()):
        if "--dport " in text:
            rule = parse_rule(text)
            # Health checks use TCP, also for service ports of other protocols.
            protocols = [one.value for one in Protocol] if rule.target == "ACCEPT" else [rule.protocol]
            yield from ((rule.title, protocol) for protocol in protocols)


def _jumps(*rulesets: Ruleset) -> Iterator[tuple[str, str]]:
    """Yield the jumps between our chains. The target is the last word of such a rule."""
    for ruleset in rulesets:
        for (_, chain), rules in ruleset.chains.items():
            for rule in rules:
                target = rule[rule.rfind(" ") + 1 :]
                if target.startswith("KUBE-"):
                    yield chain, target


def _reachable(start: set[str], jumps: Iterable[tuple[str, str]]) -> set[str]:
    """Return the chains that any number of jumps reach, the start included."""
    targets: dict[str, set[str]] = {}
    for chain, target in jumps:
        targets.setdefault(chain, set()).add(target)
    found, waiting = set(start), list(start)
    while waiting:
        new = targets.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _endpoints(view: ServiceView | None) -> dict[tuple[str, int], float]:
    return {(one.address, one.port): one.share for one in view.endpoints} if view else {}


def rules_difference(changes: Iterable[RuleChanges]) -> RulesDifference:
    """Return the differences of both families."""
    found = [change for change in changes if change.chains]
    return RulesDifference(
        ports=tuple(port for change in found for port in change.ports),
        chains=tuple(_chain_difference(change.family, chain) for change in found for chain in change.chains),
        families={change.family: change.messages for change in found},
        messages=tuple(message for change in found for message in change.messages),
    )


def _chain_difference(family: Family, chain: ChainDifference) -> ChainRulesDifference:
    state = _state(chain.before is not None, chain.after is not None)
    return ChainRulesDifference(family, *chain.key, state, chain.gone, chain.new)


def _state(before: bool, after: bool) -> str:
    return "changed" if before and after else "added" if after else "removed"


def unified(changes: Iterable[RuleChanges], before: str, after: str) -> SafeText:
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


def _port_sentences(
    name: PortName,
    change: str,
    policies: Sequence[tuple[PolicyDifference, ServiceView | None, ServiceView | None]],
) -> Iterator[str]:
    title = f"{name} {name.protocol}" if name.protocol != "TCP" else str(name)
    if not policies:
        yield f"{title}: different rules for the same endpoints"
    if change != "changed":
        title += f" {change}"
    several = len(policies) > 1 or any(found.policy is Policy.LOCAL for found, _, _ in policies)
    for found, before, after in policies:
        under = f" (policy {found.policy.value})" if several else ""
        if before and after:
            parts = _view_changes(found, before, after)
        else:
            parts = _one_view(before, after, with_state=change == "changed")
        yield f"{title}{under}: {'; '.join(parts)}"


def _one_view(before: ServiceView | None, after: ServiceView | None, *, with_state: bool) -> Iterator[str]:
    view = before or after
    assert view is not None, "a change has a before or an after"
    if with_state:
        yield "added" if after else "removed"
    yield ", ".join(map(str, view.frontends or view.from_this_node))
    if view.verdict is not PacketVerdict.DNAT:
        yield rejection(view)
    if view.endpoints:
        yield f"{counted(len(view.endpoints), 'endpoint')}: {_named_endpoints(view.endpoints)}"


def _view_changes(found: PolicyDifference, before: ServiceView, after: ServiceView) -> Iterator[str]:
    yield from _endpoint_changes(found)
    if before.verdict is not after.verdict:
        if before.verdict is not PacketVerdict.DNAT:
            yield _NO_LONGER[before.verdict]
        if after.verdict is not PacketVerdict.DNAT:
            yield rejection(after)
    yield from _frontend_changes(before.frontends, after.frontends, "")
    yield from _frontend_changes(before.from_this_node, after.from_this_node, " for this node and its pods")
    yield from _setting_changes(before, after)


def _endpoint_changes(found: PolicyDifference) -> Iterator[str]:
    removed, added, shares = found.endpoints_removed, found.endpoints_added, found.shares_changed
    for state, endpoints in (("removed", removed), ("added", added)):
        if endpoints:
            yield f"{counted(len(endpoints), 'endpoint')} {state}: {_named_endpoints(endpoints)}"
    pairs = {(percent(one.before), percent(one.after)) for one in shares}
    if len(pairs) == 1:
        others = " of the others" if removed or added else ""
        yield "share{} {} → {}".format(others, *next(iter(pairs)))
    elif pairs:
        yield f"different shares for {_named_endpoints(shares)}"


def _frontend_changes(before: Sequence[Frontend], after: Sequence[Frontend], where: str) -> Iterator[str]:
    for state, some, others in (("removed", before, after), ("added", after, before)):
        if only := [str(frontend) for frontend in some if frontend not in others]:
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


def _other_sentences(differences: Sequence[ChainDifference]) -> Iterator[str]:
    """Yield one sentence per table for jumps and whole chains, then one per chain with other rules."""
    if {chain.key for chain in differences if not chain.before} >= _ALWAYS:
        yield "all jumps and shared chains added: the tables have no rules of a service proxy"
        differences = [chain for chain in differences if chain.key not in _ALWAYS]
    found: dict[tuple[str, str, str], list[str]] = {}
    for differing in differences:
        table, chain = differing.key
        if differing.key in skeleton.JUMPS:
            for state, rules in (("removed", differing.gone), ("added", differing.new)):
                for rule in rules:
                    jump = f"{chain} to {parse_rule(rule).target}"
                    found.setdefault((table, "jump", state), []).append(jump)
        elif differing.before is None or differing.after is None:
            state = "added" if differing.before is None else "removed"
            found.setdefault((table, "chain", state), []).append(chain)
        else:
            found[f"{table}, {chain}", "", ""] = [_rules(differing)]
    for (where, noun, state), names in found.items():
        prefix = f"{counted(len(names), noun)} {state}: " if noun else ""
        yield f"table {where}: {prefix}{', '.join(names)}"


def _rules(difference: ChainDifference) -> str:
    states = ((difference.gone, "removed"), (difference.new, "added"))
    parts = [f"{counted(len(rules), 'rule')} {state}" for rules, state in states if rules]
    return ", ".join(parts) or "the same rules in another order"


def _named_endpoints(endpoints: Iterable[EndpointView | SharedEndpoint | ChangedShare]) -> str:
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
