"""The workload: Services with endpoints, and their addresses.

All Services are IPv4 with one port, except the dual-stack Service `default/kubernetes`, which is reachable in a family
only after the program has written the rules of that family.
"""

import random
from collections.abc import Collection, Iterator, Mapping
from ipaddress import IPv4Address
from types import MappingProxyType
from typing import NamedTuple

from pykubeproxy.lab.api import Object

NODE = "node-00"
NODE_ADDRESSES = ("10.0.0.11", "fd00:10::11")
SERVICE_CIDRS = ("10.96.0.0/12", "fd00:10:96::/112")
POD_CIDRS = ("10.128.0.0/9", "fd00:10:128::/48")
SERVICE_PORT, POD_PORT = 80, 8080
KUBERNETES = ("10.96.0.1", "fd00:10:96::1")
KUBERNETES_PODS = ("10.128.0.1", "fd00:10:128::1")
# Prefixes of the loopback interface; for IPv4 the kernel makes the whole subnet local.
OUTSIDE = ((KUBERNETES[0], 12), (KUBERNETES_PODS[0], 9), (KUBERNETES[1], 128), (KUBERNETES_PODS[1], 128))
_FIRST_SERVICE = int(IPv4Address("10.96.0.10"))
_FIRST_POD = int(IPv4Address("10.128.1.0"))
_FIRST_NEW_POD = int(IPv4Address("10.192.0.0"))
_NODES, _NAMESPACES = 50, 50
_PER_SLICE = 100


class Size(NamedTuple):
    """The number of Services and of endpoints of each."""

    services: int
    endpoints: int

    def __str__(self) -> str:
        return f"{self.services}x{self.endpoints}"

    @property
    def chains(self) -> int:
        """Return the approximate number of chains."""
        return self.services * (self.endpoints + 1)

    @classmethod
    def read(cls, text: str) -> "Size":
        """Parse text such as 5000x10. Raise ValueError."""
        services, _, endpoints = text.partition("x")
        size = cls(int(services), int(endpoints))
        if size.services < 0 or size.endpoints < 1:
            raise ValueError(text)
        return size


def vip(service: int) -> str:
    """Return the cluster IP of a Service; numbers start at 0."""
    return str(IPv4Address(_FIRST_SERVICE + service))


def pod(number: int) -> str:
    """Return the address of a pod; Service i of size S x E has the pods from i * E on."""
    return str(IPv4Address(_FIRST_POD + number))


def new_pod(number: int) -> str:
    """Return the address of a pod that no Service has at first."""
    return str(IPv4Address(_FIRST_NEW_POD + number))


def shuffled(size: Size) -> list[str]:
    """Return the cluster IPs of all Services in random order, from a fixed seed."""
    return random.Random(SERVICE_PORT).sample(
        [vip(service) for service in range(size.services)], size.services
    )


def service_name(service: int) -> str:
    """Return NAMESPACE/NAME of a Service."""
    return "/".join(_key(service))


def objects(size: Size) -> Iterator[Object]:
    """Yield all objects that a proxy reads from the API server."""
    yield _node()
    yield _service("default", "kubernetes", KUBERNETES)
    for family, address in zip(("IPv4", "IPv6"), KUBERNETES_PODS, strict=True):
        name = f"kubernetes-{family.lower()}"
        yield _slice("default", name, "kubernetes", family, [_endpoint(address, 0, ready=True)])
    for service in range(size.services):
        yield cluster_ip_service(service)
        yield from slices(size, service)


def cluster_ip_service(service: int) -> Object:
    """Return a Service."""
    return _service(*_key(service), (vip(service),))


def slices(
    size: Size,
    service: int,
    unready: Collection[int] = (),
    replaced: Mapping[int, str] = MappingProxyType({}),
) -> list[Object]:
    """Return the EndpointSlices of a Service.

    By their numbers from 0, the endpoints `unready` are not ready, and those `replaced` have other addresses.
    """
    namespace, name = _key(service)
    endpoints = [
        _endpoint(replaced.get(i) or pod(service * size.endpoints + i), service + i, i not in unready)
        for i in range(size.endpoints)
    ]
    pieces = [endpoints[at : at + _PER_SLICE] for at in range(0, size.endpoints, _PER_SLICE)]
    return [
        _slice(namespace, f"{name}-{number:05x}", name, "IPv4", piece) for number, piece in enumerate(pieces)
    ]


def _key(service: int) -> tuple[str, str]:
    return f"team-{service % _NAMESPACES:02}", f"service-{service:05}"


def _service(namespace: str, name: str, addresses: tuple[str, ...]) -> Object:
    families = ["IPv4", "IPv6"][: len(addresses)]
    # The annotation makes the object about as long as in a real cluster.
    applied = f'{{"apiVersion":"v1","kind":"Service","metadata":{{"name":"{name}"}},"spec":{{}}}}' + " " * 400
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "labels": {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": namespace},
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": applied},
        },
        "spec": {
            "clusterIP": addresses[0],
            "clusterIPs": list(addresses),
            "ipFamilies": families,
            "ipFamilyPolicy": "SingleStack" if len(families) == 1 else "RequireDualStack",
            "selector": {"app.kubernetes.io/name": name},
            "ports": [{"name": "http", "protocol": "TCP", "port": SERVICE_PORT, "targetPort": POD_PORT}],
        },
    }


def _slice(namespace: str, name: str, service: str, family: str, endpoints: list[Object]) -> Object:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "labels": {
                "kubernetes.io/service-name": service,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
        },
        "addressType": family,
        "ports": [{"name": "http", "protocol": "TCP", "port": POD_PORT}],
        "endpoints": endpoints,
    }


def _endpoint(address: str, number: int, ready: bool) -> Object:
    return {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": ready, "terminating": False},
        "nodeName": f"node-{number % _NODES:02}",
        "zone": f"zone-{number % 3}",
        "targetRef": {"kind": "Pod", "namespace": "default", "name": f"pod-{address}"},
    }


def _node() -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "labels": {"topology.kubernetes.io/zone": "zone-0"}},
        "spec": {"podCIDR": "10.128.0.0/24", "podCIDRs": ["10.128.0.0/24", "fd00:10:128::/64"]},
        "status": {"addresses": [{"type": "InternalIP", "address": ip} for ip in NODE_ADDRESSES]},
    }
