"""Many Services in a lab, in addition to those of a test."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import NamedTuple

from pykubeproxy.lab.api import POD_PORT as PORT
from pykubeproxy.lab.api import SERVICES, SLICES, Api, Object, in_namespace
from pykubeproxy.lab.prober import Target
from pykubeproxy.services.ports import PortName

# A separate namespace, which Lab.reset does not delete.
NAMESPACE = "crowd"
# Near the first addresses and node ports (30086) that the lab's API server allocates.
FIRST_ADDRESSES, FIRST_NODE_PORT = ("10.96.1.0", "fd00:10:96::100"), 30081
_PORT = 80
_AT_ONCE = 3


class Crowd(NamedTuple):
    """Services of the same pods, whose IPv4 and IPv6 addresses are `pods`.

    `stride` is the distance between their addresses and node ports. Every `both`-th Service has both families and a
    node port; the others have IPv4 only.
    """

    api: Api
    pods: Sequence[tuple[str, str]]
    stride: int = 1
    both: int = 1

    def create(self, numbers: range) -> None:
        """Create the Services of these numbers, from 0 on, and their EndpointSlices in parallel."""
        with ThreadPoolExecutor(_AT_ONCE) as writers:
            list(writers.map(self._create, numbers))

    def delete(self, numbers: range) -> None:
        """Delete the Services of these numbers and their EndpointSlices."""
        with ThreadPoolExecutor(_AT_ONCE) as writers:
            list(writers.map(self._delete, numbers))

    def vip(self, number: int) -> Target:
        """Return the IPv4 cluster IP and port of a Service."""
        return Target(self._addresses(number)[0], _PORT)

    def port_name(self, number: int) -> PortName:
        """Return the service port that names a Service's chains."""
        return PortName(NAMESPACE, _name(number), "http", "TCP")

    def _create(self, number: int) -> None:
        self.api.call("POST", in_namespace(SERVICES, NAMESPACE), self._service(number))
        for slice_ in self._slices(number):
            self.api.call("POST", in_namespace(SLICES, NAMESPACE), slice_)

    def _delete(self, number: int) -> None:
        self.api.delete(f"{in_namespace(SERVICES, NAMESPACE)}/{_name(number)}")
        for slice_ in self._slices(number):
            self.api.delete(f"{in_namespace(SLICES, NAMESPACE)}/{slice_['metadata']['name']}")

    def _families(self, number: int) -> tuple[str, ...]:
        return ("IPv4", "IPv6") if number % self.both == 0 else ("IPv4",)

    def _addresses(self, number: int) -> list[str]:
        firsts = FIRST_ADDRESSES[: len(self._families(number))]
        return [str(ip_address(first) + number * self.stride) for first in firsts]

    def _service(self, number: int) -> Object:
        addresses, families = self._addresses(number), self._families(number)
        port: Object = {"name": "http", "protocol": "TCP", "port": _PORT, "targetPort": PORT}
        if len(families) == 2:
            port["nodePort"] = FIRST_NODE_PORT + number // self.both * self.stride
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": _name(number), "namespace": NAMESPACE},
            "spec": {
                "type": "NodePort" if "nodePort" in port else "ClusterIP",
                "clusterIP": addresses[0],
                "clusterIPs": addresses,
                "ipFamilies": list(families),
                "ipFamilyPolicy": "SingleStack" if len(families) == 1 else "RequireDualStack",
                "ports": [port],
            },
        }

    def _slices(self, number: int) -> list[Object]:
        return [
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": f"{_name(number)}-{family.lower()}",
                    "namespace": NAMESPACE,
                    "labels": {"kubernetes.io/service-name": _name(number)},
                },
                "addressType": family,
                "ports": [{"name": "http", "protocol": "TCP", "port": PORT}],
                "endpoints": [
                    {"addresses": [pod[family == "IPv6"]], "conditions": {"ready": True}} for pod in self.pods
                ],
            }
            for family in self._families(number)
        ]


def _name(number: int) -> str:
    return f"s{number:04}"
