"""Connections through cluster IPs, node ports and affinity go on, whatever becomes of the agent of their node."""

import os
import random
import time
from collections.abc import Iterator

import pytest

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.stage import Stage, dispatched
from tests.fakes.traffic import Traffic

pytestmark = pytest.mark.root

CROWD = range(300)
SOME = range(100)


def settles(node: Stage, count: int, *, tree: bool, masquerades: bool = False) -> None:
    """Wait until the tables serve so many Services of the crowd, in this manner."""
    node.lab.until(node.is_in_place, "the rules are in place")
    node.lab.until(lambda: holds(node) == (count, tree, masquerades), f"{count} are served, {tree=}")


def holds(node: Stage) -> tuple[int, bool, bool]:
    """How many of the crowd have their chain, whether a tree leads there, and whether all is masqueraded."""
    nat = node.tables.save(["nat"]).chains
    served = sum(node.chain(number) in nat for number in CROWD)
    heads = nat.get(ChainKey("nat", names.SERVICES), ())
    tree = any("/32" not in rule and " -d " in f" {rule}" and "KUBE-SVC-" in rule for rule in heads)
    last = nat.get(node.chain(CROWD[-1]), ())
    return served, tree, any("KUBE-MARK-MASQ" in rule and "! -s" not in rule for rule in last)


@pytest.fixture(params=["nft", "legacy"])
def node(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A node whose agent serves default/web, default/sticky and a crowd, found one by one."""
    settings = {"logging": {"verbosity": 2}, "pykubeproxy": {"iptablesBackend": request.param}}
    name = f"on{request.param}{os.getpid()}"
    with Lab(name, backend=request.param, settings=settings, agents=False) as lab:
        lab.timeout = 60.0
        made = Stage(lab)
        made.crowd.create(CROWD)
        made.start(dispatched("flat"))
        settles(made, len(CROWD), tree=False)
        yield made


def restart(node: Stage, chance: random.Random) -> None:
    """Stopped and started, over unchanged objects and over changed ones."""
    node.start(dispatched("flat"))
    settles(node, len(CROWD), tree=False)
    node.agent.stop()
    node.crowd.delete(SOME)
    node.start(dispatched("flat"))
    settles(node, len(CROWD) - len(SOME), tree=False)


def killed(node: Stage, chance: random.Random) -> None:
    """SIGKILL at some moment of a sync, several times; what is left half done is finished by the next agent."""
    node.agent.kill()
    for number in range(3):
        (node.crowd.create if number % 2 == 0 else node.crowd.delete)(SOME)
        node.start(dispatched("flat"))
        node.lab.until(node.is_busy, "the agent writes")
        time.sleep(chance.uniform(0.0, 0.15))
        node.agent.kill()
    node.start(dispatched("flat"))
    settles(node, len(CROWD), tree=False)


def rearranged(node: Stage, chance: random.Random) -> None:
    """Dispatch changes by a restart: to a tree, to flat and back."""
    node.start(dispatched("tree"))
    settles(node, len(CROWD), tree=True)
    node.start(dispatched("flat"))
    settles(node, len(CROWD), tree=False)
    node.start(dispatched("tree"))
    settles(node, len(CROWD), tree=True)


def reconfigured(node: Stage, chance: random.Random) -> None:
    """A changed setting that every Service's chain has to show: all of them are decided and written anew."""
    for masquerades in (True, False):
        config = {"iptables": {"masqueradeAll": masquerades, "minSyncPeriod": "200ms"}}
        node.start(dispatched("tree", **config))
        settles(node, len(CROWD), tree=True, masquerades=masquerades)


def test_connections_go_on(node: Stage) -> None:
    """None fails, of those that are held and of those that are made, and with affinity all reach the same pod."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with Traffic(node.ways()) as traffic:
        for phase in (restart, killed, rearranged, reconfigured):
            begun, before = time.monotonic(), traffic.total()
            phase(node, chance)
            print(f"{phase.__name__}: {time.monotonic() - begun:.1f} s, {traffic.total() - before} answers")
            assert not traffic.failures(), phase.__name__
    print(traffic)
    assert not traffic.failures()
    assert all(seen.pods.total() > 50 for seen in traffic.seen.values())
