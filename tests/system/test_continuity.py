"""Connections survive restarts and kills of the node's agent, and hand-overs from and to kube-proxy."""

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from pykubeproxy.kernel import Backend, Iptables, KernelError, open_iptables
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.prober import ProbeTarget
from pykubeproxy.objects import Family
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey
from tests.cases import as_restore_input, comparable, load_case
from tests.fakes.follower import eventually
from tests.fakes.kube_proxy import without_unknown
from tests.fakes.process import HEALTH, answers, inside_a_namespace, running
from tests.fakes.stage import Stage, dispatch_settings
from tests.fakes.traffic import Traffic, TrafficRoute, echo_command

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


NODE = "192.168.99.10"
WEB = TrafficRoute("cluster IP", ProbeTarget("10.96.1.1", 80))
# By case: connections, and how our agent ends.
CASES = {
    "nodeport": ([WEB, TrafficRoute("node port", ProbeTarget(NODE, 30080))], "terminate"),
    "affinity": ([WEB._replace(affine=True)], "kill"),
}


class KubeProxy:
    """Writes the recorded rules of a case like kube-proxy: filter and nat in one restore."""

    def __init__(self, case: str, tables: Iptables) -> None:
        self._case, self._tables = case, tables

    def start(self) -> None:
        """Write the rules; existing jumps stay, chains of unknown Services are deleted."""
        nat = self._tables.save(["nat"]).chains
        jumps = not nat.get(ChainKey("nat", "PREROUTING"))
        text = as_restore_input(self._case, Family.IPV4, jumps=jumps)
        head, _, rest = text.partition("*nat\n")
        body, _, end = rest.rpartition("COMMIT\n")
        lines = without_unknown(body.splitlines(), nat)
        self._tables.restore("\n".join([f"{head}*nat", *lines, f"COMMIT\n{end}"]))

    def is_in_force(self) -> bool:
        """Return whether filter and nat equal kube-proxy's."""
        recorded_input = as_restore_input(self._case, Family.IPV4)
        live = comparable(self._tables.save(["filter", "nat"]))
        rules = {f"-A {key.chain} {rule}" for key, rules in live.items() for rule in rules}
        return rules == {line for line in recorded_input.splitlines() if line.startswith("-A")}


def agent_flags(case: str, tables: Iptables, folder: Path) -> tuple[str, ...]:
    """Return flags for an agent with the configuration and the objects of a case, which dispatches by a tree."""
    document = load_case(case)
    settings = {"iptablesBackend": tables.backend.value, "dispatch": "tree"}
    (folder / "config").write_text(yaml.safe_dump(document["config"] | {"pykubeproxy": settings}))
    items = [*document["objects"], document["node"]]
    (folder / "objects.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    return f"--config={folder}/config", f"--manifests={folder}/objects.json"


@pytest.fixture(params=["nft", "legacy"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Iptables]:
    """The tables of a node with the pods of the cases, in one namespace with the test."""
    with ExitStack() as stack:
        stack.enter_context(inside_a_namespace())
        os.environ["XTABLES_LOCKFILE"] = str(tmp_path / "lock")
        stack.callback(os.environ.pop, "XTABLES_LOCKFILE")
        subprocess.run(["ip", "addr", "add", f"{NODE}/32", "dev", "lo"], check=True)
        subprocess.run(["ip", "route", "add", "10.96.0.0/16", "dev", "lo"], check=True)
        for number, address in enumerate(("10.244.1.11", "10.244.2.12", "10.244.3.13")):
            subprocess.run(["ip", "addr", "add", f"{address}/32", "dev", "lo"], check=True)
            pod = subprocess.Popen(echo_command(f"pod{number}", address), stdout=subprocess.PIPE)
            stack.callback(pod.wait)
            stack.callback(pod.kill)
            assert pod.stdout
            assert pod.stdout.readline() == b"ready\n"
        yield open_iptables(Backend(request.param), Family.IPV4)


@pytest.mark.parametrize("case", CASES)
def test_no_connection_fails_during_handovers(tables: Iptables, case: str, tmp_path: Path) -> None:
    """Whether our agent is stopped or killed; none of our chains remain."""
    ways, end = CASES[case]
    flags = agent_flags(case, tables, tmp_path)
    kube_proxy = KubeProxy(case, tables)
    kube_proxy.start()
    assert kube_proxy.is_in_force()
    with Traffic(ways) as traffic:
        with running(tmp_path / "log", *flags) as agent:
            eventually(lambda: answers(HEALTH, "/readyz", 200), 30)
            assert not kube_proxy.is_in_force()  # kube-proxy has no dispatch tree
            before = traffic.total()
            eventually(lambda: traffic.total() > before + 40)
            getattr(agent, end)()
            agent.wait(10)
        kube_proxy.start()
        assert kube_proxy.is_in_force()
        after = traffic.total()
        eventually(lambda: traffic.total() > after + 40)
    print(traffic)
    assert not traffic.failures()


__all__ = ["tables"]


def written(kube_proxy: KubeProxy) -> bool:
    """Write kube-proxy's rules; return False if the agent wrote at the same time, as kube-proxy then tries again."""
    try:
        kube_proxy.start()
    except KernelError:
        return False
    return True


def test_no_connection_fails_while_both_run(tables: Iptables, tmp_path: Path) -> None:
    """Each replaces the rules of the other, three times; the agent's form is a dispatch tree."""
    ways, _ = CASES["nodeport"]
    flags = agent_flags("nodeport", tables, tmp_path)
    kube_proxy = KubeProxy("nodeport", tables)
    kube_proxy.start()
    with Traffic(ways) as traffic, running(tmp_path / "log", *flags):
        eventually(lambda: answers(HEALTH, "/readyz", 200), 30)
        for _ in range(3):
            eventually(lambda: not kube_proxy.is_in_force(), 30)
            eventually(lambda: written(kube_proxy))
            before = traffic.total()
            eventually(lambda: traffic.total() > before + 40)
        eventually(lambda: not kube_proxy.is_in_force(), 60)
    assert not traffic.failures(), traffic
    assert "drift repaired" in (tmp_path / "log").read_text()  # several writes may need one repair
