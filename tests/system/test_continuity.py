"""Connections through cluster IPs, node ports and affinity survive restarts of the node's agent."""

import os
import random
import time
from collections.abc import Iterator

import pytest

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.stage import Stage, dispatch_settings
from tests.fakes.traffic import Traffic

pytestmark = pytest.mark.root

CROWD = range(300)
SOME = range(100)


def wait_until_synced(node: Stage, count: int, *, tree: bool, masquerades: bool = False) -> None:
    """Wait until the tables serve this number of crowd Services in this way."""
    node.lab.until(node.is_synced, "the rules are in place")
    node.lab.until(lambda: table_state(node) == (count, tree, masquerades), f"{count} are served, {tree=}")


def table_state(node: Stage) -> tuple[int, bool, bool]:
    """Return the number of served crowd Services, whether a tree leads there, and whether all are masqueraded."""
    nat = node.tables.save(["nat"]).chains
    served = sum(node.chain(number) in nat for number in CROWD)
    heads = nat.get(ChainKey("nat", names.SERVICES), ())
    tree = any("/32" not in rule and " -d " in f" {rule}" and "KUBE-SVC-" in rule for rule in heads)
    last = nat.get(node.chain(CROWD[-1]), ())
    return served, tree, any("KUBE-MARK-MASQ" in rule and "! -s" not in rule for rule in last)


@pytest.fixture(params=["nft", "legacy"])
def node(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A node whose agent serves default/web, default/sticky and a crowd, with flat dispatch."""
    settings = {"logging": {"verbosity": 2}, "pykubeproxy": {"iptablesBackend": request.param}}
    name = f"on{request.param}{os.getpid()}"
    with Lab(name, backend=request.param, settings=settings, agents=False) as lab:
        lab.timeout = 60.0
        stage = Stage(lab)
        stage.crowd.create(CROWD)
        stage.start(dispatch_settings("flat"))
        wait_until_synced(stage, len(CROWD), tree=False)
        yield stage


def restart(node: Stage, rng: random.Random) -> None:
    """Restart the agent, over unchanged and over changed objects."""
    node.start(dispatch_settings("flat"))
    wait_until_synced(node, len(CROWD), tree=False)
    node.agent.stop()
    node.crowd.delete(SOME)
    node.start(dispatch_settings("flat"))
    wait_until_synced(node, len(CROWD) - len(SOME), tree=False)


def kill(node: Stage, rng: random.Random) -> None:
    """Kill the agent during several syncs; the last agent completes the rules."""
    node.agent.kill()
    for number in range(3):
        (node.crowd.create if number % 2 == 0 else node.crowd.delete)(SOME)
        node.start(dispatch_settings("flat"))
        node.lab.until(node.is_busy, "the agent writes")
        time.sleep(rng.uniform(0.0, 0.15))
        node.agent.kill()
    node.start(dispatch_settings("flat"))
    wait_until_synced(node, len(CROWD), tree=False)


def switch_dispatch(node: Stage, rng: random.Random) -> None:
    """Restart with tree, flat and tree dispatch."""
    node.start(dispatch_settings("tree"))
    wait_until_synced(node, len(CROWD), tree=True)
    node.start(dispatch_settings("flat"))
    wait_until_synced(node, len(CROWD), tree=False)
    node.start(dispatch_settings("tree"))
    wait_until_synced(node, len(CROWD), tree=True)


def reconfigure(node: Stage, rng: random.Random) -> None:
    """Change a setting that rewrites every Service's chain."""
    for masquerades in (True, False):
        config = {"iptables": {"masqueradeAll": masquerades, "minSyncPeriod": "200ms"}}
        node.start(dispatch_settings("tree", **config))
        wait_until_synced(node, len(CROWD), tree=True, masquerades=masquerades)


def test_no_connection_fails_during_restarts(node: Stage) -> None:
    """Neither held nor new ones; with affinity all reach the same pod."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Traffic(node.routes()) as traffic:
        for phase in (restart, kill, switch_dispatch, reconfigure):
            begun, before = time.monotonic(), traffic.total()
            phase(node, rng)
            print(f"{phase.__name__}: {time.monotonic() - begun:.1f} s, {traffic.total() - before} answers")
            assert not traffic.failures(), phase.__name__
    print(traffic)
    assert not traffic.failures()
    assert all(seen.pods.total() > 50 for seen in traffic.seen.values())
