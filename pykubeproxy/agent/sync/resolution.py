"""Resolve the Services to render: their ports, the endpoints this node uses, and the context of their rules."""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping

import msgspec

from pykubeproxy.agent.quarantine.quarantine import Quarantine
from pykubeproxy.agent.sync.large import port_names
from pykubeproxy.objects import Key
from pykubeproxy.rules import names
from pykubeproxy.rules.applied import AppliedState
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.digests import AppliedPort, DesiredPort, KeptPort
from pykubeproxy.rules.options import LARGE_CLUSTER_ENDPOINTS
from pykubeproxy.rules.service import reject_service
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName, whole_service
from pykubeproxy.services.selection import ResolvedPort
from pykubeproxy.services.size import Oversized


class Resolution(msgspec.Struct, frozen=True):
    """The ports of the Services to render, by name, and the context of their rules.

    `oversized` are those of the Services that are too large to be served; they have no ports here. Nor have `kept` ports,
    which stay as they are. `reduced` ports have only endpoints whose chains exist.
    """

    services: Mapping[Key, tuple[ResolvedPort, ...]]
    oversized: Mapping[Key, Oversized]
    kept: frozenset[PortName]
    reduced: frozenset[PortName]
    context: RuleContext

    def ports(self) -> tuple[ResolvedPort, ...]:
        """Return the service ports to render."""
        return tuple(port for ports in self.services.values() for port in ports)

    def desired(
        self, quarantine: Quarantine, applied: AppliedState
    ) -> dict[Key, tuple[DesiredPort | KeptPort, ...]]:
        """Return the rules of all service ports, or what replaces them in quarantine."""
        options = self.context.options
        desired: dict[Key, tuple[DesiredPort | KeptPort, ...]] = {}
        for key, ports in self.services.items():
            found: dict[PortName, DesiredPort | KeptPort] = {
                port.name: KeptPort(port) for port in applied.ports(key) if port.name in self.kept
            }
            for port in ports:
                name, endpoints = port.port.name, len(port.selection.verdicts)
                found[name] = DesiredPort(
                    name, quarantine.rules(port, options), endpoints, name in self.reduced
                )
            desired[key] = tuple(found[name] for name in sorted(found))
        for key, it in self.oversized.items():
            rules = reject_service(key, it.cluster_ip, options)
            desired[key] = (DesiredPort(whole_service(key), rules, 0),)
        return desired

    def gone(self, applied: AppliedState) -> tuple[PortName, ...]:
        """Return the service ports that had rules and no longer exist."""
        names = {port.port.name for port in self.ports()} | self.kept
        names |= set(map(whole_service, self.oversized))
        return tuple(
            port.name for key in self.services for port in applied.ports(key) if port.name not in names
        )


def resolve(
    cluster: Cluster,
    keys: Collection[Key],
    applied: AppliedState,
    context: RuleContext,
    portions: Mapping[Key, Mapping[PortName, Container[str] | None]],
) -> Resolution:
    """Resolve these Services. Set the option `large_cluster` by the number of all endpoints.

    Of a Service in `portions`, only the given ports are rendered. Those with chains may use only these endpoint chains.
    """
    services: dict[Key, tuple[ResolvedPort, ...]] = {}
    too_large: dict[Key, Oversized] = {}
    kept: set[PortName] = set()
    reduced: set[PortName] = set()
    for key in keys:
        portion = portions.get(key)
        found = context.resolve(cluster, key, portion)
        if isinstance(found, Oversized):
            services[key], too_large[key] = (), found
        else:
            services[key] = _by_name(found)
        if portion is not None:
            kept.update(name for name in port_names(cluster, key) if name not in portion)
            chains = {name: chains for name, chains in portion.items() if chains is not None}
            reduced |= chains.keys()
            services[key] = tuple(_reduced(services[key], applied.ports(key), chains))
    before = sum(port.endpoints for key in keys for port in applied.ports(key) if port.name not in kept)
    now = sum(len(port.selection.verdicts) for ports in services.values() for port in ports)
    large = applied.endpoints() - before + now > LARGE_CLUSTER_ENDPOINTS
    context = msgspec.structs.replace(
        context, options=msgspec.structs.replace(context.options, large_cluster=large)
    )
    return Resolution(services, too_large, frozenset(kept), frozenset(reduced), context)


def resolve_service(cluster: Cluster, service: Key, context: RuleContext) -> tuple[ResolvedPort, ...]:
    """Return the ports of one Service, by name; none if it is oversized."""
    found = context.resolve(cluster, service)
    return () if isinstance(found, Oversized) else _by_name(found)


def _reduced(
    ports: Iterable[ResolvedPort], applied: Iterable[AppliedPort], allowed: Mapping[PortName, Container[str]]
) -> Iterator[ResolvedPort]:
    """Yield ports; those in `allowed` with only the endpoints that have one of these chains, or not if new without any."""
    known = {port.name for port in applied}
    for resolved in ports:
        name, selection = resolved.port.name, resolved.selection
        if name not in allowed:
            yield resolved
            continue
        chains = allowed[name]
        kept = {it.target for it in selection.reachable if names.endpoint_chain(name, it.target) in chains}
        if kept or name in known:
            used = {it.target for it in selection.reachable}
            smaller = msgspec.structs.replace(
                selection,
                cluster=tuple(it for it in selection.cluster if it.target in kept),
                local=tuple(it for it in selection.local if it.target in kept),
                reachable=tuple(it for it in selection.reachable if it.target in kept),
                any_usable=selection.any_usable and bool(kept or not used),
                verdicts=tuple(
                    it
                    for it in selection.verdicts
                    if it.endpoint.target not in used or it.endpoint.target in kept
                ),
            )
            yield msgspec.structs.replace(resolved, selection=smaller)


def _by_name(ports: Iterable[ResolvedPort]) -> tuple[ResolvedPort, ...]:
    """Sort ports by name. A manifest may use a name twice: the last one counts, as in `render`."""
    named = {port.port.name: port for port in ports}
    return tuple(named[name] for name in sorted(named))
