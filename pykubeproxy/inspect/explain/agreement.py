"""Compare the endpoints that a node's rules have with those that its objects give."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pykubeproxy.inspect.dump.model import ServiceView, views
from pykubeproxy.inspect.explain.model import PolicyExplanation, PortExplanation
from pykubeproxy.inspect.explain.nodes import ServiceOnNodes
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.inspect.routes import PacketVerdict, Policy
from pykubeproxy.objects import Family, address_and_port
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.wording import listed

_LISTED = 3


class Agreement(msgspec.Struct, frozen=True):
    """Whether the rules of a node agree with its explanation.

    - `differences`: a sentence each
    - `unread`: why its rules are unknown; "" if they are known
    """

    node: str
    differences: tuple[str, ...] = ()
    unread: str = ""


def agreement(node: str, services: Iterable[ServiceOnNodes], rulesets: Mapping[Family, Ruleset]) -> Agreement:
    """Compare each service port. `services` are explained for this node alone; families without rules are left out."""
    found = (difference for service in services for difference in _of_service(service, rulesets))
    return Agreement(node, tuple(found))


def _of_service(service: ServiceOnNodes, rulesets: Mapping[Family, Ruleset]) -> Iterator[str]:
    query = ServiceFilter(service.first.service.namespace, service.first.service.name)
    found = {
        (view.name, view.family, view.policy): view
        for ruleset in rulesets.values()
        for view in views(ruleset, {}, query)
    }
    names = {(name, family) for name, family, _ in found}
    for port in (it.first for it in service.ports if it.first.family in rulesets):
        title = f"{port.name} {port.name.protocol} {port.family.value}"
        if (port.name, port.family) not in names:
            yield f"{title}: the rules do not have it."
            continue
        for policy in port.policies:
            view = found.get((port.name, port.family, policy.policy))
            if difference := _difference(port, policy, view):
                yield f"{title}, policy {policy.policy.value}: {difference}."


def _difference(port: PortExplanation, policy: PolicyExplanation, view: ServiceView | None) -> str:
    expected = {it.resolved.target for it in policy.endpoints if it.reason.used}
    actual = {address_and_port(it.address, it.port) for it in view.endpoints} if view else set()
    if expected and not actual and view and view.verdict is not PacketVerdict.DNAT:
        return f"the rules {view.verdict.value} its packets"
    if not _is_in_rules(port, policy):
        return ""
    parts = (
        _named("the rules lack", expected - actual),
        _named("the rules have, but the objects do not,", actual - expected),
    )
    return "; ".join(filter(None, parts))


def _is_in_rules(port: PortExplanation, policy: PolicyExplanation) -> bool:
    """Return whether rules show the endpoints of a policy: that of cluster IPs, or that of other frontends."""
    return bool(policy.frontends or (policy.policy is Policy.CLUSTER and port.port.external_local))


def _named(what: str, targets: Iterable[str]) -> str:
    some = sorted(targets)
    return f"{what} {listed(some, _LISTED)}" if some else ""
