"""A Service that was there before is served all the while, whatever becomes of two thousand others and of the agent."""

import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from pykubeproxy.kernel import Backend, Runner, open_iptables
from pykubeproxy.lab.agents import Agent, node_environment
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.objects import Family
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.crowd import Crowd

pytestmark = pytest.mark.root

MANY = 2000
FIRST_HALF, SECOND_HALF = range(MANY // 2), range(MANY // 2, MANY)
PAUSE = 0.02  # seconds between two connections of a stream
BRANCH = re.compile(r"-d \S+/(?!32 )\d+ -j KUBE-SVC-")


class Node:
    """Node1 of a lab: its agent, the crowd of Services, and what the tables for IPv4 hold of them."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.pods = lab.deploy("web", 3)
        (self.caller,) = lab.deploy("caller", 1, nodes=["node1"])
        self.web = lab.service("web", type="NodePort")
        self.crowd = Crowd(lab.api, [pod.addresses for pod in self.pods], stride=2, both=5)
        self.agent: Agent = lab.agents["node1"]
        lock = node_environment(lab.logs, "node1")["XTABLES_LOCKFILE"]
        inside = ("ip", "netns", "exec", lab.nodes["node1"].namespace.name)
        runner = Runner(inside, {"XTABLES_LOCKFILE": lock})
        self._tables = open_iptables(Backend(lab.backend), Family.IPV4, runner)

    def start(self, dispatch: str = "auto") -> None:
        """Start the agent, a running one anew."""
        if self.agent.pid:
            self.agent.stop()
        self._logged, self._started = len(self.agent.log()), time.time()
        self.agent.start(dispatched(dispatch))

    def is_in_place(self) -> bool:
        """Whether the agent has brought the tables up to date since it was started."""
        return "rules in place" in self.agent.log()[self._logged :]

    def is_busy(self) -> bool:
        """Whether the agent has begun to write since it was started, or found nothing to write."""
        return bool(self.agent.restores(since=self._started)) or self.is_in_place()

    def has(self, number: int) -> bool:
        """Whether the chain of a Service of the crowd is there."""
        return self._tables.has_chain(ChainKey("nat", self._chain(number)))

    def holds(self) -> tuple[int, bool]:
        """How many Services of the crowd have their chain, and whether KUBE-SERVICES leads to whole networks."""
        nat = self._tables.save(["nat"]).chains
        served = sum(ChainKey("nat", self._chain(number)) in nat for number in range(MANY))
        return served, any(BRANCH.match(rule) for rule in nat.get(ChainKey("nat", names.SERVICES), ()))

    def served(self) -> int:
        """How many Services of the crowd have their chain."""
        return self.holds()[0]

    def settles(self, served: int, tree: bool) -> None:
        """Wait until the agent has brought everything up to date."""
        self.lab.until(self.is_in_place, "the rules are in place")
        self.lab.until(lambda: self.holds() == (served, tree), f"{served} are served, by a tree: {tree}")

    def _chain(self, number: int) -> str:
        return names.cluster_chain(self.crowd.port_name(number))


@pytest.fixture(params=["nft", "legacy"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node whose agent serves default/web, with three pods; the crowd is not there yet."""
    settings = {"logging": {"verbosity": 2}, "pykubeproxy": {"iptablesBackend": request.param}}
    name = f"gap{request.param}{os.getpid()}"
    with Lab(name, backend=request.param, settings=settings, agents=False) as lab:
        lab.timeout = 60.0
        made = Node(lab)
        made.start()
        made.settles(0, tree=False)
        yield made


def dispatched(how: str) -> Object:
    return {"pykubeproxy": {"dispatch": how}}


@contextmanager
def served_throughout(node: Node, while_: str) -> Iterator[None]:
    """New connections to default/web all the while, from a pod and from outside, over both families: none fails."""
    pod, outside, place = node.caller.prober, node.lab.client.prober, node.lab.nodes["node1"]
    streams = {
        f"{where}, IPv{family}": prober.stream(target, pause=PAUSE)
        for family in (4, 6)
        for where, prober, target in (
            ("pod", pod, node.web.vip(family)),
            ("outside", outside, place.node_port(node.web, family)),
        )
    }
    try:
        yield
    finally:
        seen = {where: stream.stop() for where, stream in streams.items()}
        print(
            f"{while_}:",
            ", ".join(f"{where}: {it}, slowest {it.slowest:.3f} s" for where, it in seen.items()),
        )
    assert not any(it.failed for it in seen.values()), while_
    assert all(it.total > 50 and len(it.pods) == 3 for it in seen.values()), while_


def load(node: Node, chance: random.Random) -> None:
    """The crowd comes: one half while the agent runs, is killed and started again, the other while it is away.

    What it then finds to do is done in several attempts.
    """
    with ThreadPoolExecutor(1) as other:
        created = other.submit(node.crowd.create, FIRST_HALF)
        for _ in range(2):
            time.sleep(chance.uniform(0.2, 1.2))  # until a bad moment, whichever it is
            node.agent.kill()
            node.start()
        created.result()
    node.agent.kill()
    node.crowd.create(SECOND_HALF)
    before = node.served()
    reached = [attempt(node, SECOND_HALF[chance.randrange(*among)]) for among in ((0, 100), (300, 600))]
    print("services of the crowd that are served:", before, *reached)
    if node.lab.backend == "nft":
        assert any(before < served < MANY for served in reached), "killed half way"
    node.start()
    node.settles(MANY, tree=True)
    for number in chance.sample(range(MANY), 20):
        assert not node.caller.prober.tcp(node.crowd.vip(number), 3).failed


def attempt(node: Node, number: int) -> int:
    """Start the agent and kill it as soon as a Service of the crowd is there; returns how many are."""
    node.start()
    node.lab.until(lambda: node.has(number), f"service {number} is there")
    node.agent.kill()
    return node.served()


def switch(node: Node, chance: random.Random) -> None:
    """Dispatch changes by a restart, to flat and back to a tree, also after a kill."""
    node.start("flat")
    node.settles(MANY, tree=False)
    node.start("tree")
    node.settles(MANY, tree=True)
    for dispatch in ("flat", "tree"):
        kill_at_work(node, chance.uniform(0.0, 0.15), dispatch)
    node.start("flat")
    node.settles(MANY, tree=False)
    node.start()
    node.settles(MANY, tree=True)


def unload(node: Node, chance: random.Random) -> None:
    """The crowd goes: one half while the agent runs and is killed, the other while it is away."""
    with ThreadPoolExecutor(1) as other:
        deleted = other.submit(node.crowd.delete, FIRST_HALF)
        time.sleep(chance.uniform(0.2, 1.2))
        node.agent.kill()
        node.start()
        deleted.result()
    node.agent.kill()
    node.crowd.delete(SECOND_HALF)
    before = node.served()
    reached = []
    for _ in range(2):
        kill_at_work(node, chance.uniform(0.0, 0.3))
        reached.append(node.served())
    print("services of the crowd that are still served:", before, *reached)
    node.start()
    node.settles(0, tree=False)


def kill_at_work(node: Node, seconds: float, dispatch: str = "auto") -> None:
    """Start the agent and kill it so many seconds after it began to write."""
    node.start(dispatch)
    node.lab.until(node.is_busy, "the agent writes")
    time.sleep(seconds)
    node.agent.kill()


def test_no_connection_fails(node: Node) -> None:
    """Not one, to a Service that was there before, while thousands come, go, and are arranged anew."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for phase in (load, switch, unload):
        with served_throughout(node, phase.__name__):
            phase(node, chance)
