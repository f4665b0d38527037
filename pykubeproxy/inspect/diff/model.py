"""Compare two Rulesets, and assign the differences to services."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pykubeproxy.inspect.dump.model import EndpointView, PortRules, ServiceView, find_ports, port_views
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.objects import Family, Protocol
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.difference import ChainDifference, difference
from pykubeproxy.rules.ownership import is_owned
from pykubeproxy.rules.parse import parse_rule
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.ports import PortName

# iptables keeps probabilities in 31 bits; smaller changes are noise.
_NOISE = 1e-6


class PolicyChange(msgspec.Struct, frozen=True):
    """The change of a service port under one policy; None on a side without frontends under it."""

    policy: Policy
    before: ServiceView | None
    after: ServiceView | None

    @property
    def removed(self) -> tuple[EndpointView, ...]:
        """The endpoints only before."""
        return _only(self.before, self.after)

    @property
    def added(self) -> tuple[EndpointView, ...]:
        """The endpoints only after."""
        return _only(self.after, self.before)

    @property
    def reweighted(self) -> tuple[tuple[EndpointView, EndpointView], ...]:
        """The endpoints on both sides with other shares."""
        before, after = _endpoints(self.before), _endpoints(self.after)
        pairs = ((old, after[key]) for key, old in before.items() if key in after)
        return tuple((old, new) for old, new in pairs if abs(old.share - new.share) > _NOISE)


class ServiceChange(msgspec.Struct, frozen=True):
    """The change of one service port; no policies if its rules differ, but not what they do.

    `present` tells whether the service port is there before, and after.
    """

    name: PortName
    present: tuple[bool, bool]
    policies: tuple[PolicyChange, ...]


class Changes(msgspec.Struct, frozen=True):
    """The differences between two states of one family's tables.

    - `chains`: every chain that differs
    - `services`: the service ports that change
    - `others`: jumps, fixed chains, and the rules of shared chains that belong to no service; all rules of a chain in
      which only the order differs
    - `branches`: chains of the dispatch tree that differ
    - `unreferenced`: chains that differ and that no jump leads to, before or after
    """

    family: Family
    chains: tuple[ChainDifference, ...] = ()
    services: tuple[ServiceChange, ...] = ()
    others: tuple[ChainDifference, ...] = ()
    branches: tuple[str, ...] = ()
    unreferenced: tuple[str, ...] = ()


def compare(before: Ruleset, after: Ruleset) -> Changes:
    """Compare two Rulesets of one family that hold only the chains and rules to compare."""
    chains = difference(before, after)
    if not chains:
        return Changes(after.family)
    sides = [find_ports(ruleset, ServiceFilter()) for ruleset in (before, after)]
    own = {chain.key.chain for chain in chains if is_owned(chain.key)}
    jumps = tuple(_jumps(before, after))
    above = _reachable(own, ((target, chain) for chain, target in jumps))
    reachable = _reachable({key.chain for key in skeleton.SHARED}, jumps)
    targets = {rule.target for ports in sides for port in ports.values() for rule in port.serving}
    branches = (own & reachable) - _reachable(targets, jumps)
    return Changes(
        family=after.family,
        chains=chains,
        services=tuple(_services(_affected(sides, chains, above), sides, (before, after))),
        others=tuple(_others(chains)),
        branches=tuple(
            chain.key.chain for chain in chains if chain.key.chain in branches and _branches_differ(chain)
        ),
        unreferenced=tuple(sorted(own - reachable)),
    )


def _affected(
    sides: Sequence[Mapping[PortName, PortRules]], chains: Sequence[ChainDifference], above: set[str]
) -> list[PortName]:
    """Return the service ports with a rule in a differing chain, or with a path to one."""
    titles = {title for chain in _frontend_rules(chains) for title in _titles(chain)}
    return [
        name
        for name in sorted({**sides[0], **sides[1]})
        if (str(name), name.protocol) in titles
        or any(rule.target in above for ports in sides if name in ports for rule in ports[name].serving)
    ]


def _services(
    affected: Sequence[PortName],
    sides: Sequence[Mapping[PortName, PortRules]],
    rulesets: Sequence[Ruleset],
) -> Iterator[ServiceChange]:
    views: list[dict[tuple[PortName, Policy], ServiceView]] = []
    for ports, ruleset in zip(sides, rulesets, strict=True):
        some = {name: ports[name] for name in affected if name in ports}
        views.append({(view.name, view.policy): view for view in port_views(ruleset, {}, some)})
    before, after = views
    for name in affected:
        pairs = (
            PolicyChange(policy, before.get((name, policy)), after.get((name, policy))) for policy in Policy
        )
        yield ServiceChange(name, (name in sides[0], name in sides[1]), tuple(filter(_differs, pairs)))


def _differs(change: PolicyChange) -> bool:
    before, after = change.before, change.after
    if before is None or after is None:
        return before is not after
    bare = [msgspec.structs.replace(view, endpoints=()) for view in (before, after)]
    return bare[0] != bare[1] or bool(change.removed or change.added or change.reweighted)


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
            # Health checks use TCP, whatever the service port's protocol.
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


def _endpoints(view: ServiceView | None) -> dict[tuple[str, int], EndpointView]:
    return {(one.address, one.port): one for one in view.endpoints} if view else {}


def _only(view: ServiceView | None, other: ServiceView | None) -> tuple[EndpointView, ...]:
    known = _endpoints(other)
    return tuple(one for key, one in _endpoints(view).items() if key not in known)
