"""Hold the first sync back until everything that rules need from the API server is known."""

import math
from collections.abc import Mapping

from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.objects import Family, Kind, Node
from pykubeproxy.rules.context import missing_network, primary_family
from pykubeproxy.services.cluster import Cluster

# How long to wait for the Node object's addresses and pod CIDRs, in seconds, as kube-proxy does.
WAIT_FOR_ADDRESSES = 30.0
WAIT_FOR_POD_CIDRS = 300.0


class StartGate:
    """Decide when syncs may start. `wait_for_node` is false if no Node object will arrive."""

    def __init__(
        self,
        config: Config,
        node_name: str,
        unsupported: Mapping[Family, str],
        wait_for_node: bool,
        started: float,
    ) -> None:
        self._config = config
        self._node_name = node_name
        self._unsupported = unsupported
        self._wait_for_node = wait_for_node
        self._started = started

    def opens_at(self, cluster: Cluster, node: Node | None) -> float:
        """Return until when syncs must wait for missing information; -infinity if nothing is missing."""
        if not cluster.has_listed(Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.NODE):
            return math.inf
        if self._lacks_pod_cidrs(node):
            return self._started + WAIT_FOR_POD_CIDRS
        if self._wait_for_node and not (node and node.addresses):
            return self._started + WAIT_FOR_ADDRESSES
        return -math.inf

    def obstacle(self, node: Node | None) -> str:
        """Return why this node cannot be served at all; "" if it can."""
        if self._lacks_pod_cidrs(node):
            return f"node {self._node_name} has no podCIDRs, which detectLocalMode NodeCIDR needs; allocate them or set another mode"
        return self._unsupported.get(primary_family(self._config, node), "") or missing_network(
            self._config, node, self._unsupported
        )

    def _lacks_pod_cidrs(self, node: Node | None) -> bool:
        by_node = self._config.detect_local.mode is DetectLocalMode.NODE_CIDR
        return by_node and self._wait_for_node and not (node and node.pod_cidrs)
