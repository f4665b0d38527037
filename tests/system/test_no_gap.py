"""An existing Service stays served during changes of a thousand others and restarts of the agent."""

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

MANY = 1000
FIRST_HALF, SECOND_HALF = range(MANY // 2), range(MANY // 2, MANY)
PAUSE = 0.02  # seconds between two connections of a stream
BRANCH = re.compile(r"-d \S+/(?!32 )\d+ -j KUBE-SVC-")


class Node:
    """Node1 of a lab: its agent, the crowd of Services, and their rules for IPv4."""

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
        """Start or restart the agent."""
        if self.agent.pid:
            self.agent.stop()
        self._logged, self._started = len(self.agent.log()), time.time()
        self.agent.start(dispatch_settings(dispatch))

    def is_synced(self) -> bool:
        """Return whether the agent has synced since its start."""
        return "rules in place" in self.agent.log()[self._logged :]

    def is_busy(self) -> bool:
        """Return whether the agent has started to write since its start, or had nothing to write."""
        return bool(self.agent.restores(since=self._started)) or self.is_synced()

    def has_chain(self, number: int) -> bool:
        """Return whether a crowd Service has its chain."""
        return self._tables.has_chain(ChainKey("nat", self._chain(number)))

    def table_state(self) -> tuple[int, bool]:
        """Return the number of served crowd Services, and whether KUBE-SERVICES has branches."""
        nat = self._tables.save(["nat"]).chains
        served = sum(ChainKey("nat", self._chain(number)) in nat for number in range(MANY))
        return served, any(BRANCH.match(rule) for rule in nat.get(ChainKey("nat", names.SERVICES), ()))

    def served(self) -> int:
        """Return the number of crowd Services with a chain."""
        return self.table_state()[0]

    def wait_until_synced(self, served: int, tree: bool) -> None:
        """Wait until the agent has synced this state."""
        self.lab.until(self.is_synced, "the rules are in place")
        self.lab.until(
            lambda: self.table_state() == (served, tree), f"{served} are served, by a tree: {tree}"
        )

    def _chain(self, number: int) -> str:
        return names.cluster_chain(self.crowd.port_name(number))


@pytest.fixture(params=["nft", "legacy"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node whose agent serves default/web with three pods; the crowd does not exist yet."""
    settings = {"logging": {"verbosity": 2}, "pykubeproxy": {"iptablesBackend": request.param}}
    name = f"gap{request.param}{os.getpid()}"
    with Lab(name, backend=request.param, settings=settings, agents=False) as lab:
        lab.timeout = 60.0
        made = Node(lab)
        made.start()
        made.wait_until_synced(0, tree=False)
        yield made


def dispatch_settings(how: str) -> Object:
    return {"pykubeproxy": {"dispatch": how}}


@contextmanager
def assert_served(node: Node, phase_name: str) -> Iterator[None]:
    """Assert that no new connection to default/web fails, from a pod and from outside, over both families."""
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
            f"{phase_name}:",
            ", ".join(f"{where}: {it}, slowest {it.slowest:.3f} s" for where, it in seen.items()),
        )
    assert not any(it.failed for it in seen.values()), phase_name
    assert all(it.total > 50 and len(it.pods) == 3 for it in seen.values()), phase_name


def load(node: Node, rng: random.Random) -> None:
    """Create the crowd: one half while the agent runs and is killed, the other while it is stopped.

    Then write the rules in several attempts.
    """
    with ThreadPoolExecutor(1) as other:
        created = other.submit(node.crowd.create, FIRST_HALF)
        for _ in range(2):
            time.sleep(rng.uniform(0.2, 1.2))  # until a random moment of a sync
            node.agent.kill()
            node.start()
        created.result()
    node.agent.kill()
    node.crowd.create(SECOND_HALF)
    before = node.served()
    reached = [attempt(node, SECOND_HALF[rng.randrange(*among)]) for among in ((0, 50), (150, 300))]
    print("services of the crowd that are served:", before, *reached)
    if node.lab.backend == "nft":
        assert any(before < served < MANY for served in reached), "killed half way"
    node.start()
    node.wait_until_synced(MANY, tree=True)
    for number in rng.sample(range(MANY), 20):
        assert not node.caller.prober.tcp(node.crowd.vip(number), 3).failed


def attempt(node: Node, number: int) -> int:
    """Start the agent, kill it when a crowd Service is served, and return the number of served ones."""
    node.start()
    node.lab.until(lambda: node.has_chain(number), f"service {number} is there")
    node.agent.kill()
    return node.served()


def switch(node: Node, rng: random.Random) -> None:
    """Restart with flat and tree dispatch, also after a kill."""
    node.start("flat")
    node.wait_until_synced(MANY, tree=False)
    node.start("tree")
    node.wait_until_synced(MANY, tree=True)
    for dispatch in ("flat", "tree"):
        kill_while_writing(node, rng.uniform(0.0, 0.15), dispatch)
    node.start("flat")
    node.wait_until_synced(MANY, tree=False)
    node.start()
    node.wait_until_synced(MANY, tree=True)


def unload(node: Node, rng: random.Random) -> None:
    """Delete the crowd: one half while the agent runs and is killed, the other while it is stopped."""
    with ThreadPoolExecutor(1) as other:
        deleted = other.submit(node.crowd.delete, FIRST_HALF)
        time.sleep(rng.uniform(0.2, 1.2))
        node.agent.kill()
        node.start()
        deleted.result()
    node.agent.kill()
    node.crowd.delete(SECOND_HALF)
    before = node.served()
    reached = []
    for _ in range(2):
        kill_while_writing(node, rng.uniform(0.0, 0.3))
        reached.append(node.served())
    print("services of the crowd that are still served:", before, *reached)
    node.start()
    node.wait_until_synced(0, tree=False)


def kill_while_writing(node: Node, seconds: float, dispatch: str = "auto") -> None:
    """Start the agent and kill it some seconds after its first write."""
    node.start(dispatch)
    node.lab.until(node.is_busy, "the agent writes")
    time.sleep(seconds)
    node.agent.kill()


def test_no_connection_to_an_existing_service_fails(node: Node) -> None:
    """While a thousand others are created, deleted and rewritten."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for phase in (load, switch, unload):
        with assert_served(node, phase.__name__):
            phase(node, rng)
