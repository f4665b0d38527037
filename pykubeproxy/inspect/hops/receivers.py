"""Find the nodes that may receive packets from outside the cluster, in groups that should treat them alike."""

from collections.abc import Iterable, Sequence

import msgspec

from pykubeproxy.inspect.explain.nodes import NodeGroup, PortOnNodes
from pykubeproxy.inspect.routes import Policy
from pykubeproxy.services.frontend import FrontendKind

# How many nodes are read: a load balancer sends to any.
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


def receivers(port: PortOnNodes, kind: FrontendKind, via: str = "") -> Sequence[Receivers]:
    """Return the nodes that may receive packets to a frontend of this kind; with `via`, that node only."""
    if via:
        return [Receivers(via)]
    internal = kind is FrontendKind.CLUSTER_IP
    local = port.first.port.internal_local if internal else port.first.port.external_local
    groups = port.policies[Policy.LOCAL if local else Policy.CLUSTER]
    return _read_some(groups)


def _read_some(groups: Iterable[NodeGroup]) -> Sequence[Receivers]:
    """Choose a node of each group. Of too many groups that serve, some stay unread; all others are read."""
    found: list[Receivers] = []
    serving = 0
    for group in groups:
        serving += group.serves
        if group.serves and serving >= MOST_READ:
            found.append(Receivers("", group.nodes, True))
        else:
            found.append(Receivers(group.nodes[0], group.nodes[1:], group.serves))
    return found
