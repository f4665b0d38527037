"""The node under test: its pods, which never stop, its agents, its Services and their changes, and the routes to them."""

import os
import random
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from threading import Event
from typing import NamedTuple
from unittest import mock

import pykubeproxy
from pykubeproxy.kernel import Backend, Iptables, Runner, open_iptables
from pykubeproxy.lab.agents import ProxyProcess, agent, node_environment
from pykubeproxy.lab.api import NAMESPACES, POD_PORT, SERVICES, SLICES, Api, Object, in_namespace, namespace
from pykubeproxy.lab.apiserver.patches import merged
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import OUTSIDE, OUTSIDE_CROWD, SITES, Namespace
from pykubeproxy.lab.pods import LabPod
from pykubeproxy.objects import Family
from pykubeproxy.rules.ownership import is_ours
from tests.fakes.traffic import Crowd

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


def create(api: Api, pods: Sequence[LabPod]) -> None:
    """Create the Services; all pods are their endpoints."""
    api.put(NAMESPACES, NAMESPACE, namespace(NAMESPACE))
    for name, spec in _SPECS.items():
        api.call("POST", in_namespace(SERVICES, NAMESPACE), _service(name, spec))
        if ingress := _BALANCERS.get(name):
            status = {"loadBalancer": {"ingress": [{"ip": address} for address in ingress]}}
            api.call("PATCH", f"{in_namespace(SERVICES, NAMESPACE)}/{name}/status", {"status": status})
        set_endpoints(api, name, pods)


def set_endpoints(api: Api, name: str, pods: Sequence[LabPod]) -> None:
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
                        "addresses": [item.addresses[index]],
                        "conditions": {"ready": True},
                        "nodeName": item.site.name,
                    }
                    for item in pods
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


def routes(pod: LabPod, endpoint: LabPod) -> list[Route]:
    """Return the routes from outside, from a pod of the node, from an endpoint, and from the node itself."""
    return [item for index in (0, 1) for item in _routes_of_family(index, pod, endpoint)]


def _routes_of_family(index: int, pod: LabPod, endpoint: LabPod) -> list[Route]:
    host = SITES[NODE].addresses[index]
    crowd = (OUTSIDE_CROWD, CLIENT_CROWD_V6)[index]
    outside = (OUTSIDE[index], *crowd)
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


_POD = Path(__file__).with_name("pod.py")
_CROWD = 240  # Services; above 200 addresses, dispatch=auto makes a tree
_CHANGING = range(_CROWD, _CROWD + 40)


NEXT_VERSION = "999.0.0"
_WRITTEN = re.compile(r" synced .*kind=full .*chains_written=(\d+)")


def _next_version(folder: Path) -> Mapping[str, str]:
    """Copy the program with a higher version into a folder; return the environment that runs the copy."""
    source = Path(pykubeproxy.__file__).parent
    shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    module = folder / source.name / "__init__.py"
    module.write_text(module.read_text().replace(pykubeproxy.__version__, NEXT_VERSION))
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


class Node:
    """Node1 of a lab. `agent` runs after `start`; `backend` and `settings` are for the next start."""

    def __init__(self, lab: Lab, backend: Backend, seed: int) -> None:
        self.lab, self.backend = lab, backend
        self.settings: Object = {}
        network = lab.network
        for cidr, via in zip(EXTERNAL_CIDRS, SITES[NODE].addresses, strict=True):
            network.fabric.route(cidr, via=via)
        for address in CLIENT_CROWD_V6:
            network.outside.address("eth0", address, 64)
        self.pods = [_start(lab, f"pod{number}", node) for number, node in enumerate([*SITES, *SITES])]
        self.caller = _start(lab, "caller", NODE)
        for pod in (*self.pods, self.caller):
            pod.wait_answering()
        create(lab.api, self.pods)
        self.crowd = Crowd(lab.api, [pod.addresses for pod in self.pods], stride=2, both=5)
        self.crowd.create(range(_CROWD))
        self.agent = lab.agents[NODE]
        self._spare = self._other_agent("second")
        with mock.patch.dict(os.environ, _next_version(lab.directory.path / "next")):
            self._next = self._other_agent("next")
        self._seed = seed
        self._created: set[int] = set()

    @property
    def namespace(self) -> Namespace:
        """The node's namespace."""
        return self.agent.node

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of programs on the node."""
        return node_environment(self.lab.logs, NODE)

    def namespaces(self) -> dict[Source, Namespace]:
        """Return the namespaces of the clients."""
        return {
            Source.OUTSIDE: self.lab.network.outside,
            Source.POD: self.caller.namespace,
            Source.ENDPOINT: self.pods[0].namespace,
            Source.HOST: self.namespace,
        }

    def routes(self) -> list[Route]:
        """Return the routes of the clients."""
        return routes(self.caller, self.pods[0])

    def tables(self, family: Family, backend: Backend | None = None) -> Iptables:
        """Return the node's tables."""
        runner = Runner(
            ("ip", "netns", "exec", self.namespace.name),
            {"XTABLES_LOCKFILE": self.environment["XTABLES_LOCKFILE"]},
        )
        return open_iptables(backend or self.backend, family, runner)

    def has_rules(self, backend: Backend) -> bool:
        """Return whether the tables of a backend have chains of a service proxy."""
        tables = [self.tables(family, backend) for family in Family]
        return any(
            is_ours(key)
            for item in tables
            if backend is Backend.NFT or item.legacy_tables()
            for key in item.save().chains
        )

    def _other_agent(self, name: str) -> ProxyProcess:
        (logs := self.lab.logs / name).mkdir()
        settings = {"iptables": {"minSyncPeriod": "200ms"}}
        return agent(self.agent.node, logs, self.lab.api.url, settings)

    def start(self) -> None:
        """Start the agent and wait for its first sync."""
        self.launch()
        self.wait_for("rules in place")

    def launch(self) -> None:
        """Start the agent without waiting."""
        self._begun = len(self.agent.log())
        backend = {"pykubeproxy": {"iptablesBackend": self.backend.value}}
        self.agent.start(merged(self.settings, backend))

    def wait_for(self, event: str) -> None:
        """Wait until the agent has logged an event since its start."""
        self.lab.until(lambda: event in self.agent.log()[self._begun :], event)

    def chains_written(self) -> list[int]:
        """Return how many chains each full sync since the agent's start has written."""
        return [int(count) for count in _WRITTEN.findall(self.agent.log()[self._begun :])]

    def change_version(self) -> None:
        """Make an agent of the next version the node's, or after that, one of this version."""
        self.agent, self._next = self._next, self.agent

    def swap(self) -> ProxyProcess:
        """Make the spare agent the node's; return the one it replaces."""
        self.agent, self._spare = self._spare, self.agent
        return self._spare

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change Services and endpoints all the time."""
        ended = Event()

        def change() -> None:
            chance = random.Random(self._seed)
            while not ended.wait(chance.uniform(0.0, 0.3)):
                self._change(chance)

        with ThreadPoolExecutor(1) as other:
            changes = other.submit(change)
            try:
                yield
            finally:
                ended.set()
            changes.result()

    def _change(self, chance: random.Random) -> None:
        """Change the endpoints of a Service, or create and delete others."""
        if chance.random() < 0.7:
            some = chance.sample(self.pods, chance.randrange(1, len(self.pods) + 1))
            # The policy Local needs an endpoint on the node; an endpoint that connects to itself is among them.
            chosen = {pod.name: pod for pod in (self.pods[chance.choice((0, 2))], *some)}
            set_endpoints(self.lab.api, chance.choice(CHANGING), list(chosen.values()))
            return
        number = chance.choice(_CHANGING)
        write = self.crowd.delete if number in self._created else self.crowd.create
        write(range(number, number + 1))
        self._created ^= {number}


def _start(lab: Lab, name: str, node: str) -> LabPod:
    return lab.start_pod(name, name, node, [sys.executable, "-I", "-S", str(_POD), name])
