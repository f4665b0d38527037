"""Where connections come from and go to: nodes, the client, and Services."""

from dataclasses import dataclass

from pykubeproxy.lab.namespaces import Namespace
from pykubeproxy.lab.prober import Prober, Target


@dataclass(frozen=True)
class Service:
    """A Service of the lab as the API server made it."""

    name: str
    cluster_ips: tuple[str, ...]
    port: int
    node_port: int

    def vip(self, family: int = 4) -> Target:
        """Its cluster IP of a family, with its port."""
        return next(Target(ip, self.port) for ip in self.cluster_ips if (":" in ip) == (family == 6))


@dataclass(frozen=True)
class Place:
    """Somewhere to connect from: a node or the client."""

    namespace: Namespace
    addresses: tuple[str, str]

    @property
    def prober(self) -> Prober:
        """Connections from here."""
        return Prober(self.namespace)

    def node_port(self, service: Service, family: int = 4) -> Target:
        """A Service's node port at this place's address."""
        return Target(self.addresses[family == 6], service.node_port)
