"""A lab in which connections are held while things happen to node1: its pods stay on the line, and a crowd is there."""

import time
from collections.abc import Sequence

from pykubeproxy.kernel import Backend, Iptables, Runner, open_iptables
from pykubeproxy.lab.agents import Agent, node_environment
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.objects import Family
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.crowd import Crowd
from tests.fakes.traffic import Way, echo_command

_STICKY = ["10.96.0.50", "fd00:10:96::50"]


def tables(lab: Lab, node: str, family: Family = Family.IPV4) -> Iptables:
    """The tables of a node, as a program on it would see them."""
    lock = node_environment(lab.logs, node)["XTABLES_LOCKFILE"]
    inside = ("ip", "netns", "exec", lab.nodes[node].namespace.name)
    return open_iptables(Backend(lab.backend), family, Runner(inside, {"XTABLES_LOCKFILE": lock}))


def dispatched(how: str, **settings: object) -> Object:
    """Settings of an agent that finds Services so."""
    return {"pykubeproxy": {"dispatch": how}, **settings}


class Stage:
    """Node1 serves default/web and default/sticky, of three pods on both nodes; its agent is not started yet."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        pods = [
            lab.start_pod(f"web-{number}", "web", f"node{number % 2 + 1}", echo_command(f"web-{number}"))
            for number in range(3)
        ]
        for pod in pods:
            pod.wait_answering()
        (self._caller,) = lab.deploy("caller", 1, nodes=["node1"])
        self._web = lab.service("web", type="NodePort")
        self._sticky = lab.service(
            "sticky",
            selector={"app": "web"},
            sessionAffinity="ClientIP",
            clusterIP=_STICKY[0],
            clusterIPs=_STICKY,
        )
        self.crowd = Crowd(lab.api, [pod.identity.addresses for pod in pods], stride=2, both=5)
        self.agent: Agent = lab.agents["node1"]
        self.tables = tables(lab, "node1")

    def ways(self) -> list[Way]:
        """From a pod of the node and from outside, over both families."""
        pod, client = self._caller.namespace.entered, self.lab.client.namespace.entered
        outside = self.lab.nodes["node1"]
        return [
            Way("cluster IP", self._web.vip(4), pod),
            Way("cluster IP, IPv6", self._web.vip(6), pod),
            Way("affinity", self._sticky.vip(4), pod, affine=True),
            Way("node port", outside.node_port(self._web, 4), client),
            Way("node port, IPv6", outside.node_port(self._web, 6), client),
        ]

    def start(self, settings: Object | None = None) -> None:
        """Start the agent, a running one anew."""
        if self.agent.pid:
            self.agent.stop()
        self._logged, self._started = len(self.agent.log()), time.time()
        self.agent.start(settings)

    def is_in_place(self) -> bool:
        """Whether the agent has brought the tables up to date since it was started."""
        return "rules are in place" in self.agent.log()[self._logged :]

    def is_busy(self) -> bool:
        """Whether the agent has begun to write since it was started, or found nothing to write."""
        return bool(self.agent.restores(since=self._started)) or self.is_in_place()

    def chain(self, number: int) -> ChainKey:
        """The chain of a Service of the crowd, which is there while it has endpoints."""
        return ChainKey("nat", names.cluster_chain(self.crowd.port_name(number)))

    def served(self, numbers: Sequence[int]) -> set[int]:
        """Those of the crowd that have their chain."""
        nat = self.tables.save(["nat"]).chains
        return {number for number in numbers if self.chain(number) in nat}
