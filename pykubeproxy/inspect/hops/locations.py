"""Find the node that has an address, and the pod."""

from collections.abc import Iterable

import msgspec

from pykubeproxy.inspect.targets import LocationKind
from pykubeproxy.inspect.trace.packet import contains
from pykubeproxy.objects import EndpointSlice, Node
from pykubeproxy.objects.pods import Pod


class Location(msgspec.Struct, frozen=True):
    """Where an address is.

    - `node`: the name of its node; "" outside, or if the node is unknown
    - `pod`: "namespace/name"; "" if there is none or it is unknown; a pod on the host network has `kind` NODE
    - `assumed`: the node follows from podCIDRs alone, which some networks do not use
    """

    kind: LocationKind
    address: str
    node: str = ""
    pod: str = ""
    assumed: bool = False

    def __str__(self) -> str:
        """Such as "pod default/web on node1", "node1" or "203.0.113.7"."""
        if self.kind is LocationKind.OUTSIDE:
            return self.address
        if self.kind is LocationKind.NODE and not self.pod:
            return self.node
        pod = f"pod {self.pod}" if self.pod else f"pod {self.address}"
        return f"{pod} on {self.node}" if self.node else pod


class Locations:
    """The addresses of Nodes, of pods and of the endpoints in EndpointSlices."""

    def __init__(
        self, nodes: Iterable[Node], slices: Iterable[EndpointSlice] = (), pods: Iterable[Pod] = ()
    ) -> None:
        known = tuple(nodes)
        self.nodes = {node.name: node for node in known}
        self._nodes = {address: node.name for node in known for address in node.addresses}
        self._networks = [(network, node.name) for node in known for network in node.pod_cidrs]
        self._pods: dict[str, tuple[str, str]] = {}
        self._endpoints: dict[str, set[str]] = {}
        for slice_ in slices:
            self._endpoints.setdefault(str(slice_.service_key), set()).update(
                it.address for it in slice_.endpoints
            )
            for endpoint in slice_.endpoints:
                pod = f"{slice_.namespace}/{endpoint.pod}" if endpoint.pod else ""
                if endpoint.node_name:
                    self._pods[endpoint.address] = (endpoint.node_name, pod)
        for one in pods:
            # All pods on the host network have the node's addresses.
            for address in () if one.host_network else one.addresses:
                self._pods[address] = (one.node, str(one.key))

    def endpoints(self, service: str) -> frozenset[str]:
        """Return the addresses in the EndpointSlices of the Service "namespace/name"."""
        return frozenset(self._endpoints.get(service, ()))

    def find(self, address: str) -> Location:
        """Return the location of a canonical address; OUTSIDE if no object names it."""
        node, pod = self._pods.get(address, ("", ""))
        if address in self._nodes:
            return Location(LocationKind.NODE, address, self._nodes[address], pod)
        if node or pod:
            return Location(LocationKind.POD, address, node, pod)
        for network, name in self._networks:
            if contains(network, address):
                return Location(LocationKind.POD, address, name, assumed=True)
        return Location(LocationKind.OUTSIDE, address)
