"""What differs between two Rulesets, put down to the services that it is about."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pykubeproxy.inspect.dump import EndpointView, Service, ServiceView, find, views_of
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.inspect.rule import read
from pykubeproxy.inspect.wanted import Wanted
from pykubeproxy.objects import Family, Protocol
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.difference import ChainDifference, difference
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.ports import PortName

# Probabilities are kept in 31 bits; less than this is no difference.
_NOISE = 1e-6


class PolicyChange(msgspec.Struct, frozen=True):
    """What changes for a service port under one policy; None where it is not served or refused under it at all."""

    policy: Policy
    before: ServiceView | None
    after: ServiceView | None

    @property
    def gone(self) -> tuple[EndpointView, ...]:
        """The endpoints that are there before and not after."""
        return _without(_endpoints(self.before), _endpoints(self.after))

    @property
    def new(self) -> tuple[EndpointView, ...]:
        """The endpoints that are there after and not before."""
        return _without(_endpoints(self.after), _endpoints(self.before))

    @property
    def reweighted(self) -> tuple[tuple[EndpointView, EndpointView], ...]:
        """The endpoints that stay, before and after, if their share changes."""
        after = {(it.address, it.port): it for it in _endpoints(self.after)}
        pairs = ((it, after.get((it.address, it.port))) for it in _endpoints(self.before))
        return tuple((old, new) for old, new in pairs if new and abs(old.share - new.share) > _NOISE)


class ServiceChange(msgspec.Struct, frozen=True):
    """What changes for one service port; no policies if its rules differ, but not where they lead and on what terms.

    `present` tells whether the service port is there before, and after.
    """

    name: PortName
    present: tuple[bool, bool]
    policies: tuple[PolicyChange, ...]


class Changes(msgspec.Struct, frozen=True):
    """What differs between two states of one family's tables.

    - `chains`: every chain that differs
    - `services`: what that means for service ports
    - `others`: what is no single service's: in jumps, fixed chains, and what services share; of chains that services
      share only the rules that no service's name stands in, all rules if merely their order differs
    - `branches`: chains that only branch on the way to services, and do so in another way
    - `strays`: chains that differ and that nothing leads to, before or after
    """

    family: Family
    chains: tuple[ChainDifference, ...]
    services: tuple[ServiceChange, ...]
    others: tuple[ChainDifference, ...]
    branches: tuple[str, ...]
    strays: tuple[str, ...]


def changes(before: Ruleset, after: Ruleset) -> Changes:
    """Compare two Rulesets of one family; both hold nothing but what is to be compared."""
    chains = difference(before, after)
    if not chains:
        return Changes(after.family, (), (), (), (), ())
    there = [find(ruleset, Wanted()) for ruleset in (before, after)]
    own = {it.key.chain for it in chains if _is_own(it)}
    jumps = tuple(_jumps(before, after))
    above = _reached(own, ((target, chain) for chain, target in jumps))
    reached = _reached({names.SERVICES, names.NODEPORTS}, jumps)
    targets = {found.target for services in there for it in services.values() for found in it.served}
    branching = (own & reached) - _reached(targets, jumps)
    return Changes(
        family=after.family,
        chains=chains,
        services=tuple(_services(_concerned(there, chains, above), there, (before, after))),
        others=tuple(_others(chains)),
        branches=tuple(
            it.key.chain for it in chains if it.key.chain in branching and _branches_otherwise(it)
        ),
        strays=tuple(sorted(own - reached)),
    )


def _is_own(it: ChainDifference) -> bool:
    """Whether a chain belongs to a service, or only branches on the way to some."""
    return it.key.table == "nat" and names.is_owned(it.key.chain)


def _concerned(
    there: Sequence[Mapping[PortName, Service]], chains: Iterable[ChainDifference], above: set[str]
) -> list[PortName]:
    """The service ports that a rule of a differing chain is for, or that lead into chains from which one is reached."""
    titled = {title for it in chains for title in _titles(it)}
    return [
        name
        for name in sorted({**there[0], **there[1]})
        if (str(name), name.protocol) in titled
        or any(
            found.target in above for services in there if name in services for found in services[name].served
        )
    ]


def _services(
    concerned: Sequence[PortName], there: Sequence[Mapping[PortName, Service]], rulesets: Sequence[Ruleset]
) -> Iterator[ServiceChange]:
    """The changes of the service ports, given what `find` found in each of the Rulesets."""
    seen: list[dict[tuple[PortName, Policy], ServiceView]] = []
    for services, ruleset in zip(there, rulesets, strict=True):
        some = {name: services[name] for name in concerned if name in services}
        seen.append({(view.name, view.policy): view for view in views_of(ruleset, {}, some)})
    before, after = seen
    for name in concerned:
        pairs = [(policy, before.get((name, policy)), after.get((name, policy))) for policy in Policy]
        yield ServiceChange(
            name,
            (name in there[0], name in there[1]),
            tuple(PolicyChange(*pair) for pair in pairs if _differs(pair[1], pair[2])),
        )


def _differs(before: ServiceView | None, after: ServiceView | None) -> bool:
    if before is None or after is None:
        return before is not after
    bare = [msgspec.structs.replace(view, endpoints=()) for view in (before, after)]
    change = PolicyChange(before.policy, before, after)
    return bare[0] != bare[1] or bool(change.gone or change.new or change.reweighted)


def _others(chains: Iterable[ChainDifference]) -> Iterator[ChainDifference]:
    for it in chains:
        if it.key in skeleton.SHARED:
            before, after = it.before or (), it.after or ()
            if it.before is not None and it.after is not None and sorted(before) == sorted(after):
                yield it
                continue
            old, new = (tuple(rule for rule in rules if not _title(rule)[0]) for rules in (before, after))
            if old != new or it.before is None or it.after is None:
                yield ChainDifference(
                    it.key, None if it.before is None else old, None if it.after is None else new
                )
        elif not _is_own(it):
            yield it


def _branches_otherwise(it: ChainDifference) -> bool:
    """Whether more than rules of single services differ in a chain that branches."""
    rules = (*it.gone, *it.new)
    return not rules or any(not _title(rule)[0] for rule in rules)


def _titles(it: ChainDifference) -> Iterator[tuple[str, str]]:
    """The service ports whose frontends have rules that differ, as (name, protocol)."""
    for rule in set(it.before or ()) ^ set(it.after or ()):
        if "--dport " in rule:
            title, protocol = _title(rule)
            # A health check goes by TCP, whatever the service port's protocol.
            protocols = [it.value for it in Protocol] if it.key == skeleton.FILTER_NODEPORTS else [protocol]
            yield from ((title, protocol) for protocol in protocols)


def _title(rule: str) -> tuple[str, str]:
    parts = read(rule)
    first = parts.comment.partition(" ")[0]
    return (first, parts.protocol) if "/" in first else ("", "")


def _jumps(*rulesets: Ruleset) -> Iterator[tuple[str, str]]:
    """The jumps of table nat from chain to chain of ours. The target is the last word of such a rule."""
    for ruleset in rulesets:
        for chain, rules in ruleset.of_table("nat"):
            for rule in rules:
                target = rule[rule.rfind(" ") + 1 :]
                if target.startswith("KUBE-"):
                    yield chain, target


def _reached(start: set[str], jumps: Iterable[tuple[str, str]]) -> set[str]:
    """What one gets to by any number of jumps, the start included."""
    onward: dict[str, set[str]] = {}
    for chain, target in jumps:
        onward.setdefault(chain, set()).add(target)
    found, waiting = set(start), list(start)
    while waiting:
        for chain in onward.get(waiting.pop(), ()):
            if chain not in found:
                found.add(chain)
                waiting.append(chain)
    return found


def _endpoints(view: ServiceView | None) -> tuple[EndpointView, ...]:
    return view.endpoints if view else ()


def _without(
    endpoints: tuple[EndpointView, ...], others: tuple[EndpointView, ...]
) -> tuple[EndpointView, ...]:
    known = {(it.address, it.port) for it in others}
    return tuple(it for it in endpoints if (it.address, it.port) not in known)
