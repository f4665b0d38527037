"""The Services of a hand-over test, in both families, and the routes to them."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from pykubeproxy.lab.api import POD_PORT, SERVICES, SLICES, Api, Object, in_namespace
from pykubeproxy.lab.network import CLIENT, CLIENT_CROWD, SITES
from pykubeproxy.lab.pods import Pod

NAMESPACE = "handover"
NODE = "node1"
#: Outside addresses that the network routes to the node.
EXTERNAL_CIDRS = ("198.51.100.0/24", "2001:db8:51::/64")
CLIENT_CROWD_V6 = tuple(f"2001:db8:113::{last}" for last in range(101, 121))
_EXTERNAL = ("198.51.100.10", "2001:db8:51::10")
_BALANCER = ("198.51.100.20", "2001:db8:51::20")
_FILTERED_BALANCER = ("198.51.100.30", "2001:db8:51::30")
_CLIENTS = ["203.0.113.0/24", "2001:db8:113::/64"]
_PORT = 80


class Source(Enum):
    """Where connections come from."""

    OUTSIDE = "outside"
    POD = "pod"
    ENDPOINT = "endpoint"  # a pod that is an endpoint of the Service itself
    HOST = "node"


class Route(NamedTuple):
    """Connections to one address and port; `affine` if those of one source address must all reach the same pod."""

    source: Source
    name: str
    address: str
    port: int
    sources: Sequence[str]
    datagrams: bool = False
    affine: bool = False


def cluster_ips(name: str) -> tuple[str, str]:
    """Return a Service's cluster IPs."""
    number = list(_SPECS).index(name) + 60
    return f"10.96.0.{number}", f"fd00:10:96::{number}"


def node_port(name: str) -> int:
    """Return a Service's node port."""
    return 32001 + list(_SPECS).index(name)


# web's endpoints change all the time, and so do those of local, one of which is always on the node.
_SPECS: dict[str, Object] = {
    "web": {"type": "LoadBalancer", "externalIPs": [*_EXTERNAL]},
    "local": {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "loadBalancerSourceRanges": _CLIENTS,
        "healthCheckNodePort": 32101,
    },
    "sticky": {"type": "ClusterIP", "sessionAffinity": "ClientIP"},
    "dns": {"type": "NodePort"},
}
_BALANCERS = {"web": _BALANCER, "local": _FILTERED_BALANCER}
CHANGING = ("web", "local")


def create(api: Api, pods: Sequence[Pod]) -> None:
    """Create the Services; all pods are their endpoints."""
    for name, spec in _SPECS.items():
        api.call("POST", in_namespace(SERVICES, NAMESPACE), _service(name, spec))
        if ingress := _BALANCERS.get(name):
            status = {"loadBalancer": {"ingress": [{"ip": address} for address in ingress]}}
            api.call("PATCH", f"{in_namespace(SERVICES, NAMESPACE)}/{name}/status", {"status": status})
        set_endpoints(api, name, pods)


def set_endpoints(api: Api, name: str, pods: Sequence[Pod]) -> None:
    """Make these pods the endpoints of a Service."""
    for index, family in enumerate(("IPv4", "IPv6")):
        slice_name = f"{name}-{family.lower()}"
        api.put(
            in_namespace(SLICES, NAMESPACE),
            slice_name,
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": slice_name,
                    "namespace": NAMESPACE,
                    "labels": {"kubernetes.io/service-name": name},
                },
                "addressType": family,
                "ports": [{"name": "main", "protocol": _protocol(name), "port": POD_PORT}],
                "endpoints": [
                    {
                        "addresses": [it.addresses[index]],
                        "conditions": {"ready": True},
                        "nodeName": it.site.name,
                    }
                    for it in pods
                ],
            },
        )


def _service(name: str, spec: Object) -> Object:
    port: Object = {"name": "main", "protocol": _protocol(name), "port": _PORT, "targetPort": POD_PORT}
    if spec["type"] != "ClusterIP":
        port["nodePort"] = node_port(name)
    addresses = cluster_ips(name)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "clusterIP": addresses[0],
            "clusterIPs": [*addresses],
            "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack",
            "ports": [port],
            **spec,
        },
    }


def _protocol(name: str) -> str:
    return "UDP" if name == "dns" else "TCP"


def routes(pod: Pod, endpoint: Pod) -> list[Route]:
    """Return the routes from outside, from a pod of the node, from an endpoint, and from the node itself."""
    return [it for index in (0, 1) for it in _routes_of_family(index, pod, endpoint)]


def _routes_of_family(index: int, pod: Pod, endpoint: Pod) -> list[Route]:
    host = SITES[NODE].addresses[index]
    crowd = (CLIENT_CROWD, CLIENT_CROWD_V6)[index]
    outside = (CLIENT[index], *crowd)
    pods = (pod.addresses[index],)
    family = ("IPv4", "IPv6")[index]

    def route(
        source: Source, name: str, address: str, port: int, sources: Sequence[str], **more: bool
    ) -> Route:
        return Route(source, f"{name}, {family}, from {source.value}", address, port, sources, **more)

    def vip(service: str) -> str:
        return cluster_ips(service)[index]

    return [
        route(Source.OUTSIDE, "node port", host, node_port("web"), outside),
        route(Source.OUTSIDE, "external address", _EXTERNAL[index], _PORT, outside),
        route(Source.OUTSIDE, "load-balancer address", _BALANCER[index], _PORT, outside),
        route(Source.OUTSIDE, "node port, policy Local", host, node_port("local"), outside),
        route(
            Source.OUTSIDE, "load-balancer address, policy Local", _FILTERED_BALANCER[index], _PORT, outside
        ),
        route(Source.OUTSIDE, "node port, UDP", host, node_port("dns"), outside, datagrams=True),
        route(Source.POD, "cluster IP", vip("web"), _PORT, pods),
        route(Source.POD, "cluster IP, affinity", vip("sticky"), _PORT, pods, affine=True),
        route(Source.POD, "external address", _EXTERNAL[index], _PORT, pods),
        route(Source.POD, "cluster IP, UDP", vip("dns"), _PORT, pods, datagrams=True),
        route(Source.ENDPOINT, "cluster IP", vip("web"), _PORT, (endpoint.addresses[index],)),
        route(Source.HOST, "cluster IP", vip("web"), _PORT, (host,)),
        route(Source.HOST, "node port", host, node_port("web"), (host,)),
    ]
