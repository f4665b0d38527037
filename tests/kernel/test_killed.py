"""An agent that is killed at any moment of a sync: the next one ends with the tables of a fresh start."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from pykubeproxy.agent.quarantine import quarantine as set_aside
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend, Iptables, Runner, Tables, open_iptables
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Updated
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.service import PortRules, port_rules
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ServicePort
from pykubeproxy.services.selection import Selection
from tests.fakes.follower import eventually
from tests.fakes.iptables import FakeIptables
from tests.fakes.rules import GivenRules
from tests.objects import service, slice_of

pytestmark = pytest.mark.root

SERVICES, ROUNDS, KILLS = 40, 4, 3
CONFIG = load(None, {"cluster-cidr": "10.244.0.0/16"}).config
ON = rule_context(CONFIG, "node1", None, KernelFacts(nfacct=False), Family.IPV4)


@pytest.fixture(autouse=True)
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses the rules of one service, so that kills fall into telling it apart, too."""

    def spoil(port: ServicePort, selection: Selection, options: RuleOptions) -> PortRules:
        rules = port_rules(port, selection, options)
        if port.name.service != "svc7":
            return rules
        return GivenRules(
            tuple((chain, ("-m nfacct --nfacct-name nobody",)) for chain, _ in rules.chains()), rules.entries
        )  # type: ignore[return-value]

    monkeypatch.setattr(set_aside, "port_rules", spoil)


def some(chance: random.Random, number: int) -> list[Event]:
    """A service comes, changes or goes."""
    if chance.random() < 0.2:
        return [Deleted(Kind.SERVICE, Key("ns", f"svc{number}"))]
    targets = [f"10.244.{number}.{chance.randrange(250)}" for _ in range(chance.randrange(6))]
    return [
        Updated(service(f"svc{number}", cluster_ip=f"10.96.0.{number + 1}")),
        Updated(slice_of(*targets, service=f"svc{number}")),
    ]


def follow_for_ever(tables: Tables, limit: int | None, cluster: Cluster, chance: random.Random) -> None:
    """An agent's syncs, full and partial, without end."""
    followed = FamilyTables(tables, limit)
    while True:
        touched = {
            key
            for _ in range(8)
            for event in some(chance, chance.randrange(SERVICES))
            for key in cluster.apply(event)
        }
        followed.sync(cluster, touched, ON)
        if chance.random() < 0.2:
            followed.require_resync()


def killed_after(seconds: float, work: Callable[[], None]) -> None:
    """Do the work in a process of its own and kill that."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the work ended by itself"


def ours(tables: Tables) -> dict[ChainKey, tuple[str, ...]]:
    return {key: rules for key, rules in tables.save().chains.items() if rules or "KUBE" in key.chain}


@pytest.mark.parametrize("backend", [Backend.NFT, Backend.LEGACY], ids=lambda backend: backend.value)
def test_killed_at_any_moment(backend: Backend, namespace: str, runner: Runner) -> None:
    """Again and again, and what the last one left is brought in order by one sync, which then finds nothing to do."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    iptables: Iptables = open_iptables(backend, Family.IPV4, runner)
    # Small blocks, for there to be many moments.
    limit = 20 if backend is Backend.NFT else None
    cluster = Cluster()
    for _ in range(ROUNDS):
        for _ in range(KILLS):
            for number in range(SERVICES):
                for event in some(chance, number):
                    cluster.apply(event)
            worker = random.Random(chance.random())
            killed_after(
                chance.uniform(0.01, 0.25),
                lambda worker=worker: follow_for_ever(iptables, limit, cluster, worker),
            )
            # What was running in its name ends by itself.
            eventually(
                lambda: not subprocess.run(["ip", "netns", "pids", namespace], capture_output=True).stdout
            )
        fresh = FakeIptables(backend)
        FamilyTables(fresh, None).sync(cluster, (), ON)
        successor = FamilyTables(iptables, limit)
        report = successor.sync(cluster, (), ON)
        assert ours(iptables) == ours(fresh)
        assert [it.name for it in report.quarantined] in ([], ["svc7"])
        successor.require_resync()
        assert not successor.sync(cluster, (), ON).wrote
