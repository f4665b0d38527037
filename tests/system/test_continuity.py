"""Connections through cluster IPs, node ports and affinity survive restarts and kills of the node's agent.

Meanwhile, a thousand other Services are created, rewritten and deleted.
"""

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.stage import Stage, dispatch_settings
from tests.fakes.traffic import Traffic

pytestmark = pytest.mark.root

CROWD = range(1000)
FIRST_HALF, SECOND_HALF = CROWD[:500], CROWD[500:]


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
    """A node whose agent serves default/web and default/sticky; the crowd does not exist yet."""
    settings = {"logging": {"verbosity": 2}, "pykubeproxy": {"iptablesBackend": request.param}}
    name = f"on{request.param}{os.getpid()}"
    with Lab(name, backend=request.param, settings=settings, agents=False) as lab:
        lab.timeout = 60.0
        stage = Stage(lab)
        stage.start()
        wait_until_synced(stage, 0, tree=False)
        yield stage


def load(node: Stage, rng: random.Random) -> None:
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
    before = len(node.served(CROWD))
    reached = [attempt(node, SECOND_HALF[rng.randrange(*among)]) for among in ((0, 50), (150, 300))]
    print("services of the crowd that are served:", before, *reached)
    if node.lab.backend == "nft":
        assert any(before < served < len(CROWD) for served in reached), "killed half way"
    node.start()
    wait_until_synced(node, len(CROWD), tree=True)
    with Traffic(node.crowd_routes(rng.sample(CROWD, 10))) as traffic:
        node.lab.until(lambda: all(it.pods for it in traffic.seen.values()), "the crowd answers")
    assert not traffic.failures()


def attempt(node: Stage, number: int) -> int:
    """Start the agent, kill it when a crowd Service is served, and return the number of served ones."""
    node.start()
    node.lab.until(lambda: node.tables.has_chain(node.chain(number)), f"service {number} is there")
    node.agent.kill()
    return len(node.served(CROWD))


def switch_dispatch(node: Stage, rng: random.Random) -> None:
    """Restart over unchanged objects, then with flat and tree dispatch, also after a kill."""
    node.start()
    wait_until_synced(node, len(CROWD), tree=True)
    for kills in (False, True):
        for dispatch in ("flat", "tree"):
            if kills:
                kill_while_writing(node, rng.uniform(0.0, 0.15), dispatch)
            else:
                node.start(dispatch_settings(dispatch))
                wait_until_synced(node, len(CROWD), tree=dispatch == "tree")
    node.start(dispatch_settings("flat"))
    wait_until_synced(node, len(CROWD), tree=False)


def reconfigure(node: Stage, rng: random.Random) -> None:
    """Change a setting that rewrites every Service's chain."""
    for masquerades in (True, False):
        config = {"iptables": {"masqueradeAll": masquerades, "minSyncPeriod": "200ms"}}
        node.start(dispatch_settings("auto", **config))
        wait_until_synced(node, len(CROWD), tree=True, masquerades=masquerades)


def unload(node: Stage, rng: random.Random) -> None:
    """Delete the crowd: one half while the agent runs and is killed, the other while it is stopped."""
    with ThreadPoolExecutor(1) as other:
        deleted = other.submit(node.crowd.delete, FIRST_HALF)
        time.sleep(rng.uniform(0.2, 1.2))
        node.agent.kill()
        node.start()
        deleted.result()
    node.agent.kill()
    node.crowd.delete(SECOND_HALF)
    before = len(node.served(CROWD))
    reached = []
    for _ in range(2):
        kill_while_writing(node, rng.uniform(0.0, 0.3))
        reached.append(len(node.served(CROWD)))
    print("services of the crowd that are still served:", before, *reached)
    node.start()
    wait_until_synced(node, 0, tree=False)


def kill_while_writing(node: Stage, seconds: float, dispatch: str = "auto") -> None:
    """Start the agent and kill it some seconds after its first write."""
    node.start(dispatch_settings(dispatch))
    node.lab.until(node.is_busy, "the agent writes")
    time.sleep(seconds)
    node.agent.kill()


def test_no_connection_fails_during_restarts(node: Stage) -> None:
    """Neither held nor new ones; with affinity all reach the same pod."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Traffic(node.routes()) as traffic:
        for phase in (load, switch_dispatch, reconfigure, unload):
            begun, before = time.monotonic(), traffic.total()
            phase(node, rng)
            print(f"{phase.__name__}: {time.monotonic() - begun:.1f} s, {traffic.total() - before} answers")
            assert not traffic.failures(), phase.__name__
    print(traffic)
    assert not traffic.failures()
    assert all(seen.pods.total() > 200 for seen in traffic.seen.values())
    assert {len(seen.pods) for name, seen in traffic.seen.items() if name.endswith("new")} == {1, 3}
