"""Resolve the Services of a sync: the ports that get rules, those that keep theirs, and what is too large."""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping

import msgspec

from pykubeproxy.agent.quarantine import Quarantine, Refused
from pykubeproxy.agent.wanted import Wanted
from pykubeproxy.objects import Key, Protocol
from pykubeproxy.rules import names
from pykubeproxy.rules.known import KnownPort, KnownTables
from pykubeproxy.rules.options import LARGE_CLUSTER_ENDPOINTS
from pykubeproxy.rules.plan import DesiredPort, DesiredService
from pykubeproxy.rules.service import PortRules, note_rules, reject_service
from pykubeproxy.services.ports import PortName, whole_service
from pykubeproxy.services.selection import ResolvedPort
from pykubeproxy.services.size import Oversized

_NO_SCTP = Refused(
    "this node cannot match SCTP ports: it lacks the kernel module xt_sctp or the iptables extension sctp",
    rejects_clients=False,
)


class Resolution:
    """Some Services, resolved one after the other while the chains of those before are written.

    `services` are the ports of those resolved so far, by name, without those that stay as they are: `kept` ports wait for
    their turn, `held` ports are suspect. `refused` are Services that are too large to be served, and ports that no rule can
    match. `reduced` ports have only endpoints whose chains exist.
    """

    def __init__(
        self,
        wanted: Wanted,
        whole: Mapping[Key, int],
        portions: Mapping[Key, Mapping[PortName, Container[str] | None]],
        known: KnownTables,
        tried: frozenset[PortName] = frozenset(),
    ) -> None:
        """Prepare to resolve `whole` Services, which come with their costs, then the given ports of those in `portions`.

        These come with the endpoint chains that they may use; None means any. Ports that are `tried` get their own rules,
        whatever the quarantine says.
        """
        self.wanted = wanted
        self.services: dict[Key, tuple[ResolvedPort, ...]] = {}
        self.refused: dict[PortName, Refused] = {}
        self.kept: set[PortName] = set()
        self.held: set[PortName] = set()
        self.reduced: set[PortName] = set()
        self._whole = whole
        self._known = known
        self._portions = portions
        self._tried = tried

    def ports(self) -> tuple[ResolvedPort, ...]:
        """Return the service ports resolved so far."""
        return tuple(port for ports in self.services.values() for port in ports)

    def desired(self, quarantine: Quarantine) -> Iterator[DesiredService]:
        """Resolve each Service, and yield its rules, or what replaces them in quarantine."""
        options, most = self.wanted.context.options, self.wanted.context.max_service_pairs
        held = quarantine.held() - self._tried
        for key in (*self._whole, *self._portions):
            portion = self._portions.get(key)
            is_small = key in self._whole and self._whole[key] <= most
            found = self.wanted.resolve(key, portion, is_small)
            stay: set[PortName] = set()
            if isinstance(found, Oversized):
                name = whole_service(key)
                self.services[key], self.refused[name] = (), Refused(found.reason)
                rules = reject_service(key, found.cluster_ip, options)
                yield DesiredService(key, (DesiredPort(name, rules, 0),))
                continue
            ports = found
            if portion is not None:
                stay = {name for name in self.wanted.port_names(key) if name not in portion}
                chains = {name: chains for name, chains in portion.items() if chains is not None}
                ports = tuple(_reduced(ports, self._known.ports(key), chains))
                self.kept |= stay
                self.reduced |= chains.keys()
            suspects = {port.port.name for port in ports if port.port.name in held}
            if suspects:
                self.held |= suspects
                stay |= suspects
                ports = tuple(port for port in ports if port.port.name not in suspects)
            if not self.wanted.context.sctp:
                unmatched = (port.port.name for port in ports if port.port.protocol is Protocol.SCTP)
                self.refused |= dict.fromkeys(unmatched, _NO_SCTP)
            self.services[key] = ports
            yield DesiredService(
                key,
                tuple(
                    DesiredPort(
                        port.port.name,
                        self._rules(port, quarantine),
                        len(port.selection.verdicts),
                        port.port.name in self.reduced,
                    )
                    for port in ports
                ),
                frozenset(stay),
            )

    def _rules(self, port: ResolvedPort, quarantine: Quarantine) -> PortRules:
        name = port.port.name
        if name in self.refused:
            return note_rules(port.port)
        return quarantine.rules(port, self.wanted.context.options, name in self._tried)


def is_large_cluster(known: KnownTables, wanted: Wanted, keys: Collection[Key]) -> bool:
    """Return whether a family has many endpoints once these Services are written: chains then omit most comments."""
    endpoints = known.endpoints() - sum(port.endpoints for key in keys for port in known.ports(key))
    for key in keys:
        endpoints += wanted.endpoints(key)
        if endpoints > LARGE_CLUSTER_ENDPOINTS:
            return True
    return False


def _reduced(
    ports: Iterable[ResolvedPort], before: Iterable[KnownPort], allowed: Mapping[PortName, Container[str]]
) -> Iterator[ResolvedPort]:
    """Yield ports; those in `allowed` with only the endpoints that have one of these chains, or not if new with others."""
    known = {port.name for port in before}
    for resolved in ports:
        name, selection = resolved.port.name, resolved.selection
        if name not in allowed:
            yield resolved
            continue
        chains = allowed[name]
        kept = {
            endpoint.target
            for endpoint in selection.reachable
            if names.endpoint_chain(name, endpoint.target) in chains
        }
        used = {endpoint.target for endpoint in selection.reachable}
        if kept or name in known or not used:
            smaller = msgspec.structs.replace(
                selection,
                cluster=tuple(endpoint for endpoint in selection.cluster if endpoint.target in kept),
                local=tuple(endpoint for endpoint in selection.local if endpoint.target in kept),
                reachable=tuple(endpoint for endpoint in selection.reachable if endpoint.target in kept),
                any_usable=selection.any_usable and bool(kept or not used),
                verdicts=tuple(
                    verdict
                    for verdict in selection.verdicts
                    if verdict.endpoint.target not in used or verdict.endpoint.target in kept
                ),
            )
            yield msgspec.structs.replace(resolved, selection=smaller)
