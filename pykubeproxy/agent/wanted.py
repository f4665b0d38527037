"""What the cluster wants of the rules of one family: answers about one Service after the other."""

from collections.abc import Container, Mapping

import msgspec

from pykubeproxy.objects import Key
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.services.cluster import Cluster, families_of
from pykubeproxy.services.ports import (
    ANY_LOCAL,
    PortName,
    ServiceSkipReason,
    cluster_ip,
    frontends,
    service_ports,
)
from pykubeproxy.services.selection import ResolvedPort
from pykubeproxy.services.size import Oversized, count_endpoints, count_pairs, oversized


class Wanted(msgspec.Struct, frozen=True):
    """The cluster in a context of rules, which belongs to one family."""

    cluster: Cluster
    context: RuleContext

    def services(self) -> set[Key]:
        """Return the Services that may have rules."""
        family = self.context.options.family
        return {service.key for service in self.cluster.services() if family in families_of(service)}

    def is_served(self, key: Key) -> bool:
        """Return whether a Service has rules of its own."""
        service, context = self.cluster.service(key), self.context
        family = context.options.family
        if service is None or oversized(self.cluster, key, family, context.max_service_pairs):
            return False
        return not isinstance(cluster_ip(service, family), ServiceSkipReason)

    def port_names(self, key: Key) -> list[PortName]:
        """Return the names of the ports of a Service; none if there is no such Service."""
        service = self.cluster.service(key)
        ports = service.ports if service else ()
        return [PortName(*key, port.name, port.protocol.value) for port in ports]

    def cost(self, key: Key) -> int:
        """Return the pairs of a Service, and half a pair for the chain of each port: it may have but one endpoint."""
        service = self.cluster.service(key)
        pairs = count_pairs(self.cluster, key, self.context.options.family)
        return pairs + (len(service.ports) // 2 if service else 0)

    def endpoints(self, key: Key) -> int:
        """Return about how many endpoints the ports of a Service have, each counted for every port."""
        return count_endpoints(self.cluster, key, self.context.options.family)

    def frontends(self, key: Key) -> Mapping[PortName, frozenset[tuple[str, int]]]:
        """Return the addresses and ports of each service port of a Service; the address is "" for all of this node."""
        service, context = self.cluster.service(key), self.context
        if service is None:
            return {}
        ports = service_ports(service, context.options.family, context.allow_external_ips, context.reserved)
        return {
            port.name: frozenset(
                [("", port.health_check_node_port)]
                + [("" if at.address == ANY_LOCAL else at.address, at.port) for at in frontends(port)]
            )
            for port in (() if isinstance(ports, ServiceSkipReason) else ports)
        }

    def resolve(
        self, key: Key, only: Container[PortName] | None = None, is_small: bool = False
    ) -> tuple[ResolvedPort, ...] | Oversized:
        """Return the ports of a Service by name, or just some, or why it is too large: see `RuleContext.resolve`."""
        found = self.context.resolve(self.cluster, key, only, is_small)
        if isinstance(found, Oversized):
            return found
        # A manifest may use a name twice: the last one counts, as in `render`.
        named = {port.port.name: port for port in found}
        return tuple(named[name] for name in sorted(named))

    def ports(self, key: Key) -> tuple[ResolvedPort, ...]:
        """Return the ports of a Service, by name; none if it is too large."""
        found = self.resolve(key)
        return () if isinstance(found, Oversized) else found

    def reserved_since(self, before: RuleContext) -> set[Key]:
        """Return the Services that claim an address and port that only one of the two contexts reserves."""
        moved = {at for at, _ in self.context.reserved.items() ^ before.reserved.items()}
        return {
            service.key
            for service in (self.cluster.services() if moved else ())
            for ip in (*service.external_ips, *service.load_balancer_ips)
            for port in service.ports
            if (ip, port.port) in moved
        }
