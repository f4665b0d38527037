"""A lab for tests of node1's agent, with long-lived connections and many Services."""

import time
from collections.abc import Sequence

from pykubeproxy.kernel import Backend, Iptables, Runner, open_iptables
from pykubeproxy.lab.agents import AgentProcess, node_environment
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.objects import Family
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.traffic import Crowd, TrafficRoute, echo_command

_STICKY = ["10.96.0.50", "fd00:10:96::50"]


def tables(lab: Lab, node: str, family: Family = Family.IPV4) -> Iptables:
    """Return the tables of a node."""
    lock = node_environment(lab.logs, node)["XTABLES_LOCKFILE"]
    prefix = ("ip", "netns", "exec", lab.nodes[node].namespace.name)
    return open_iptables(Backend(lab.backend), family, Runner(prefix, {"XTABLES_LOCKFILE": lock}))


def dispatch_settings(mode: str, **settings: object) -> Object:
    """Return agent settings with this dispatch mode."""
    return {"pykubeproxy": {"dispatch": mode}, **settings}


class Stage:
    """default/web and default/sticky with three pods on both nodes. The agent of node1 is not started."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        pods = [
            lab.start_pod(f"web-{number}", "web", f"node{number % 2 + 1}", echo_command(f"web-{number}"))
            for number in range(3)
        ]
        for pod in pods:
            pod.wait_answering()
        (self._client_pod,) = lab.deploy("caller", 1, nodes=["node1"])
        self._web = lab.service("web", type="NodePort")
        self._sticky = lab.service(
            "sticky",
            selector={"app": "web"},
            sessionAffinity="ClientIP",
            clusterIP=_STICKY[0],
            clusterIPs=_STICKY,
        )
        self.crowd = Crowd(lab.api, [pod.addresses for pod in pods], stride=2, both=5)
        self.agent: AgentProcess = lab.agents["node1"]
        self.tables = tables(lab, "node1")

    def routes(self) -> list[TrafficRoute]:
        """Return connections from a pod of the node and from outside, over both families."""
        pod, client = self._client_pod.namespace.entered, self.lab.client.namespace.entered
        outside = self.lab.nodes["node1"]
        return [
            TrafficRoute("cluster IP", self._web.vip(4), pod),
            TrafficRoute("cluster IP, IPv6", self._web.vip(6), pod),
            TrafficRoute("affinity", self._sticky.vip(4), pod, affine=True),
            TrafficRoute("node port", outside.node_port(self._web, 4), client),
            TrafficRoute("node port, IPv6", outside.node_port(self._web, 6), client),
        ]

    def crowd_routes(self, numbers: Sequence[int]) -> list[TrafficRoute]:
        """Return connections from a pod of the node to Services of the crowd."""
        pod = self._client_pod.namespace.entered
        return [TrafficRoute(f"crowd {number}", self.crowd.vip(number), pod) for number in numbers]

    def start(self, settings: Object | None = None) -> None:
        """Start or restart the agent."""
        if self.agent.pid:
            self.agent.stop()
        self._logged, self._started = len(self.agent.log()), time.time()
        self.agent.start(settings)

    def is_synced(self) -> bool:
        """Return whether the agent has synced since its start."""
        return "rules in place" in self.agent.log()[self._logged :]

    def is_busy(self) -> bool:
        """Return whether the agent has started to write since its start, or had nothing to write."""
        return bool(self.agent.restores(since=self._started)) or self.is_synced()

    def chain(self, number: int) -> ChainKey:
        """Return the chain of a Service of the crowd; it exists while the Service has endpoints."""
        return ChainKey("nat", names.cluster_chain(self.crowd.port_name(number)))

    def served(self, numbers: Sequence[int]) -> set[int]:
        """Return the Services of the crowd that have a chain."""
        nat = self.tables.save(["nat"]).chains
        return {number for number in numbers if self.chain(number) in nat}
