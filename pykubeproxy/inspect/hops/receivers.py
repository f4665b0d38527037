"""Find the nodes that may receive packets from outside the cluster, in groups that should treat them alike."""

from collections.abc import Iterable, Sequence

import msgspec

from pykubeproxy.inspect.explain.nodes import NodeGroup, ServiceOnNodes
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.objects import Family
from pykubeproxy.services.frontend import FrontendKind
from pykubeproxy.services.ports import PortName

# How many nodes with different endpoints are read.
MOST_READ = 10


class Receivers(msgspec.Struct, frozen=True):
    """Nodes that receive packets to a frontend, and should treat them alike.

    - `read`: the node whose rules to read; "" if there are too many
    - `others`: nodes that should do the same, by the Service and its EndpointSlices
    - `serve`: whether these nodes should send packets to endpoints
    """

    read: str
    others: tuple[str, ...] = ()
    serve: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """All these nodes."""
        return (self.read, *self.others) if self.read else self.others


def receivers(
    services: Iterable[ServiceOnNodes], name: PortName, family: Family, kind: FrontendKind
) -> Sequence[Receivers]:
    """Return the nodes that may receive packets to a frontend of a service port; none if nodes do not serve it."""
    for port in (port for service in services for port in service.ports):
        if (port.first.name, port.first.family) == (name, family):
            internal = kind is FrontendKind.CLUSTER_IP
            local = port.first.port.internal_local if internal else port.first.port.external_local
            return _read_some(port.policies[Policy.LOCAL if local else Policy.CLUSTER])
    return ()


def _read_some(groups: Sequence[NodeGroup]) -> Sequence[Receivers]:
    """Choose a node of each group to read, but not of all groups that serve, if these are many."""
    serving = [group for group in groups if group.serves]
    unread = tuple(name for group in serving[MOST_READ:] for name in group.nodes)
    return (
        *(Receivers(group.nodes[0], group.nodes[1:]) for group in serving[:MOST_READ]),
        *([Receivers("", unread)] if unread else []),
        *(Receivers(group.nodes[0], group.nodes[1:], False) for group in groups if not group.serves),
    )
