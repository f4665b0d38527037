"""The tables of a node as people think of them: service, port, frontends, endpoints with their shares."""

import enum
from collections.abc import Iterable, Mapping

import msgspec

from pykubeproxy.inspect.frontends import Found, Frontend, FrontendKind, health_checks, refused, served
from pykubeproxy.inspect.known import Names
from pykubeproxy.inspect.routes import Policy, Route, affinity_seconds, route, shares
from pykubeproxy.inspect.wanted import Wanted
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import Count, Counters, Ruleset
from pykubeproxy.services.ports import PortName

_KINDS = list(FrontendKind)


class Verdict(enum.Enum):
    """What becomes of a packet to a frontend."""

    DNAT = "dnat"
    REJECT = "reject"
    DROP = "drop"
    PASS = "pass"  # noqa: S105 - not a password


class EndpointView(msgspec.Struct, frozen=True, gc=False):
    """An endpoint, the probability that it gets a new connection, and what it got since its chain was written.

    A service port has one chain for each endpoint: what policy Cluster and policy Local send it is counted together.
    Only the first packet of a connection comes through table nat, so packets are connections.
    """

    address: str
    port: int
    share: float
    packets: int
    bytes: int
    chain: str = ""


class ServiceView(msgspec.Struct, frozen=True):
    """One service port in one family under one traffic policy.

    - `frontends`: the addresses that are served by this policy
    - `from_this_node`: those that are served so only for this node and its pods, under external policy Local
    - `verdict`: REJECT without endpoints, DROP with endpoints on other nodes only
    - `set_aside`: it is not served, whatever endpoints there are, for iptables refuses its rules
    - `source_ranges`: who may come to a load balancer's IP; empty for everybody
    - `chain`: the one that balances over the endpoints, "" without any
    """

    name: PortName
    family: Family
    policy: Policy
    verdict: Verdict
    frontends: tuple[Frontend, ...]
    from_this_node: tuple[Frontend, ...]
    endpoints: tuple[EndpointView, ...]
    affinity_seconds: int | None
    source_ranges: tuple[str, ...]
    health_check_node_port: int
    chain: str = ""
    set_aside: bool = False


class Service(msgspec.Struct, frozen=True):
    """The frontends' rules of one service port: those that serve it in nat, and those that refuse it in filter."""

    served: list[Found]
    refused: list[Found]

    def numbers(self) -> set[int]:
        """The ports at which it is reached."""
        return {found.frontend.port for found in (*self.served, *self.refused)}


def find(ruleset: Ruleset, wanted: Wanted) -> Mapping[PortName, Service]:
    """The service ports that the tables of one family hold and that are wanted, sorted."""
    names = Names(ruleset, wanted)
    services: dict[PortName, Service] = {}
    for found in served(ruleset):
        services.setdefault(names.of(found), Service([], [])).served.append(found)
    for found in refused(ruleset):
        services.setdefault(names.of(found), Service([], [])).refused.append(found)
    return {
        name: services[name] for name in sorted(services) if wanted.matches(name, services[name].numbers())
    }


def views(ruleset: Ruleset, counters: Counters, wanted: Wanted | None = None) -> tuple[ServiceView, ...]:
    """What the tables of one family hold for the wanted services; an entry for each service port and policy.

    Which policy a refused service has the rules do not tell; it is shown as Cluster.
    """
    return views_of(ruleset, counters, find(ruleset, wanted or Wanted()))


def views_of(
    ruleset: Ruleset, counters: Counters, services: Mapping[PortName, Service]
) -> tuple[ServiceView, ...]:
    """The same for some of the service ports that `find` has found."""
    checks = health_checks(ruleset)
    return tuple(
        view
        for name, service in services.items()
        for view in _Port(ruleset, counters, name, checks.get(str(name), 0)).views(service)
    )


class _Path(msgspec.Struct):
    """What is gathered for one policy."""

    chain: str = ""
    frontends: dict[Frontend, None] = {}
    from_this_node: dict[Frontend, None] = {}
    source_ranges: tuple[str, ...] = ()
    refusal: Verdict | None = None
    set_aside: bool = False


class _Port(msgspec.Struct, frozen=True):
    """What the views of one service port are made from."""

    ruleset: Ruleset
    counters: Counters
    name: PortName
    health_check_node_port: int

    def views(self, service: Service) -> Iterable[ServiceView]:
        paths = {policy: _Path() for policy in Policy}
        balancers = {
            found.frontend.address
            for found in service.served
            if found.frontend.kind is FrontendKind.LOAD_BALANCER_IP
        }
        for found in service.served:
            _lead(paths, found.frontend, route(self.ruleset, found.target), balancers)
        for found in service.refused:
            _refuse(paths, found)
        for policy, path in paths.items():
            if path.frontends or path.from_this_node:
                yield self._view(policy, path)

    def _view(self, policy: Policy, path: _Path) -> ServiceView:
        endpoints = tuple(self._endpoints(path.chain)) if path.chain else ()
        return ServiceView(
            name=self.name,
            family=self.ruleset.family,
            policy=policy,
            verdict=Verdict.DNAT if endpoints else path.refusal or Verdict.PASS,
            frontends=_sorted(path.frontends),
            from_this_node=_sorted(path.from_this_node),
            endpoints=endpoints,
            affinity_seconds=affinity_seconds(self.ruleset, path.chain) if path.chain else None,
            source_ranges=path.source_ranges,
            health_check_node_port=self.health_check_node_port if policy is Policy.LOCAL else 0,
            chain=path.chain if endpoints else "",
            set_aside=path.set_aside,
        )

    def _endpoints(self, chain: str) -> Iterable[EndpointView]:
        for share in shares(self.ruleset, chain):
            address, _, port = share.target.rpartition(":")
            counts = self.counters.get(share.rule.key, ())
            count = counts[share.rule.position] if share.rule.position < len(counts) else Count()
            yield EndpointView(
                address.strip("[]"),
                int(port or 0),
                share.probability,
                count.packets,
                count.bytes,
                share.rule.key.chain,
            )


def _lead(paths: Mapping[Policy, _Path], frontend: Frontend, way: Route, balancers: Iterable[str]) -> None:
    """Note where a frontend leads."""
    path = paths[way.policy]
    path.chain = way.chain or path.chain
    path.frontends[frontend] = None
    # A load balancer's own IP is let through for the node's sake; it is none of the Service's ranges.
    own = {f"{address}/{128 if ':' in address else 32}" for address in balancers}
    path.source_ranges = path.source_ranges or tuple(r for r in way.source_ranges if r not in own)
    if way.shortcut:
        paths[Policy.CLUSTER].from_this_node[frontend] = None
        paths[Policy.CLUSTER].chain = way.shortcut


def _refuse(paths: Mapping[Policy, _Path], found: Found) -> None:
    """Note that a frontend is refused: one that nat knows under its policy, any other as the verdict suggests."""
    verdict = Verdict(found.target.lower() or Verdict.PASS)
    for path in paths.values():
        if not path.chain and any(_same(known, found.frontend) for known in path.frontends):
            path.refusal = verdict
            return
    path = paths[Policy.LOCAL if verdict is Verdict.DROP else Policy.CLUSTER]
    path.frontends[found.frontend] = None
    path.refusal = verdict
    path.set_aside = found.set_aside


def _same(known: Frontend, refused: Frontend) -> bool:
    """Whether a rule of table filter is for a frontend of nat; it refuses a node port at all addresses at once."""
    node_ports = known.kind is refused.kind is FrontendKind.NODE_PORT
    return known.port == refused.port and (node_ports or known.address == refused.address)


def _sorted(frontends: Iterable[Frontend]) -> tuple[Frontend, ...]:
    """By kind; within a kind as the rules have them."""
    return tuple(sorted(frontends, key=lambda frontend: _KINDS.index(frontend.kind)))
