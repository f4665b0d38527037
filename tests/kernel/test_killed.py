"""After an agent is killed during a sync, the next one restores the tables of a fresh start."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from pykubeproxy.agent import quarantine
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.kernel import Backend, Iptables, Runner, Tables, open_iptables
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Updated
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.service import PortRules, port_rules
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ServicePort
from pykubeproxy.services.selection import Selection
from tests.fakes.iptables import FakeIptables
from tests.fakes.rules import GivenRules
from tests.fakes.synced import flags_context
from tests.fakes.waiting import eventually
from tests.objects import service, slice_of

pytestmark = pytest.mark.root

SERVICES, ROUNDS, KILLS = 40, 4, 3
CONTEXT = flags_context(Family.IPV4, False, cluster_cidr="10.244.0.0/16")


@pytest.fixture(autouse=True)
def rejected_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernel reject the rules of one service, so that some kills hit a search."""

    def tampered_rules(port: ServicePort, selection: Selection, options: RuleOptions) -> PortRules:
        rules = port_rules(port, selection, options)
        if port.name.service != "svc7":
            return rules
        return GivenRules(
            tuple((chain, ("-m nfacct --nfacct-name nobody",)) for chain, _ in rules.chains()), rules.entries
        )  # type: ignore[return-value]

    monkeypatch.setattr(quarantine, "port_rules", tampered_rules)


def random_change(rng: random.Random, number: int) -> list[Event]:
    """Return events that create, change or delete a service."""
    if rng.random() < 0.2:
        return [Deleted(Kind.SERVICE, Key("ns", f"svc{number}"))]
    targets = [f"10.244.{number}.{rng.randrange(250)}" for _ in range(rng.randrange(6))]
    return [
        Updated(service(f"svc{number}", cluster_ip=f"10.96.0.{number + 1}")),
        Updated(slice_of(*targets, service=f"svc{number}")),
    ]


def sync_forever(tables: Tables, limit: int | None, cluster: Cluster, rng: random.Random) -> None:
    """Run full and partial syncs of random changes."""
    family_tables = FamilyTables(tables, limit)
    while True:
        changed = {
            key
            for _ in range(8)
            for event in random_change(rng, rng.randrange(SERVICES))
            for key in cluster.apply(event)
        }
        family_tables.pending.mark(changed)
        family_tables.sync(cluster, CONTEXT)
        if rng.random() < 0.2:
            family_tables.distrust()


def try_all(tables: FamilyTables, cluster: Cluster) -> None:
    """Sync, and make all tries."""
    tables.sync(cluster, CONTEXT)
    while tables.quarantine.has_tries:
        tables.try_next(cluster)
        tables.sync(cluster, CONTEXT)


def kill(work: Callable[[], None], when: Callable[[], object]) -> None:
    """Run the function in a process of its own and kill it when another function, meanwhile, returns."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    when()
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the work ended by itself"


def processes_in(namespace: str) -> bytes:
    """Return the process ids, one a line."""
    return subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, check=True).stdout


def ours(tables: Tables) -> dict[ChainKey, tuple[str, ...]]:
    return {key: rules for key, rules in tables.save().chains.items() if rules or "KUBE" in key.chain}


@pytest.mark.parametrize("backend", [Backend.NFT, Backend.LEGACY], ids=lambda backend: backend.value)
def test_one_sync_recovers_from_killed_agents(backend: Backend, namespace: str, runner: Runner) -> None:
    """The next full sync has nothing to write."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    iptables: Iptables = open_iptables(backend, Family.IPV4, runner)
    # Small blocks make more moments to be killed at.
    limit = 20 if backend is Backend.NFT else None
    cluster = Cluster()
    for _ in range(ROUNDS):
        for _ in range(KILLS):
            for number in range(SERVICES):
                for event in random_change(rng, number):
                    cluster.apply(event)
            worker = random.Random(rng.random())
            kill(
                lambda: sync_forever(iptables, limit, cluster, worker),
                when=lambda: time.sleep(rng.uniform(0.01, 0.25)),
            )
            # Wait for commands of the killed agent.
            eventually(lambda: not processes_in(namespace))
        fresh = FakeIptables(backend)
        try_all(FamilyTables(fresh, None), cluster)
        successor = FamilyTables(iptables, limit)
        try_all(successor, cluster)
        assert ours(iptables) == ours(fresh)
        assert [quarantined.name for quarantined in successor.quarantined()] in ([], ["svc7"])
        successor.distrust()
        assert not successor.sync(cluster, CONTEXT).wrote


@pytest.mark.parametrize("backend", [Backend.NFT, Backend.LEGACY], ids=lambda backend: backend.value)
def test_a_killed_agent_writes_nothing_more(backend: Backend, namespace: str, runner: Runner) -> None:
    """Although the pipe to iptables-restore holds hundreds of blocks."""
    iptables = open_iptables(backend, Family.IPV4, runner)
    blocks = "".join(f"*nat\n:KUBE-SVC-{number:05} - [0:0]\nCOMMIT\n" for number in range(5_000))

    def write() -> None:
        with iptables.session() as session:
            session.write(blocks)
            time.sleep(600)

    kill(write, when=lambda: eventually(lambda: ours(iptables)))
    begun, at_once = time.monotonic(), len(ours(iptables))
    eventually(lambda: not processes_in(namespace))
    print(f"{backend.value}: no process after {time.monotonic() - begun:.2f} s")
    written = len(ours(iptables))
    assert at_once <= written <= at_once + 1  # the kernel completes a commit
    time.sleep(1)
    assert len(ours(iptables)) == written
