"""Whatever others do to our chains in real tables is heard of, told in numbers, and put right; what is theirs stays."""

import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pykubeproxy.agent.drift.reader import TableReader
from pykubeproxy.agent.drift.schedule import DriftSchedule
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.config import load
from pykubeproxy.kernel import (
    TABLES,
    Backend,
    ExternalWrite,
    Runner,
    WatchedTables,
    open_iptables,
    watch_tables,
)
from pykubeproxy.kernel.legacy import legacy_tables
from pykubeproxy.kernel.restore import RestoreSession
from pykubeproxy.objects import Deleted, Family, Key, Kind, Listed
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster
from tests.fakes.drift import scope
from tests.fakes.follower import eventually
from tests.objects import service, slice_of
from tests.strategies import NODE

pytestmark = pytest.mark.root

OF_OTHERS = """*nat
:CNI-HOSTPORT - [0:0]
-I PREROUTING -m comment --comment first -j CNI-HOSTPORT
-A PREROUTING -m comment --comment last -j CNI-HOSTPORT
-A CNI-HOSTPORT -p tcp -m tcp --dport 7777 -j RETURN
COMMIT
*filter
-I INPUT -p tcp -m tcp --dport 22 -j ACCEPT
-A FORWARD -p udp -j ACCEPT
COMMIT
*mangle
-A OUTPUT -p tcp -j ACCEPT
COMMIT
"""
PREROUTING = ChainKey("nat", "PREROUTING")
DOCUMENT = {
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "kind": "KubeProxyConfiguration",
    "clusterCIDR": "10.244.0.0/16,fd00:10:244::/64",
}


class Node:
    """Tables of one family with the rules of three services, those of others among them, and a watch on them."""

    def __init__(self, backend: Backend, family: Family, lock: Path) -> None:
        self.runner = Runner(environment={"XTABLES_LOCKFILE": str(lock)})
        self.real = open_iptables(backend, family, self.runner)
        self.run("restore", "--noflush", text=OF_OTHERS)
        self.heard: list[ExternalWrite] = []
        self.watch = watch_tables(backend, self.heard.append)
        self.real = open_iptables(
            backend, family, Runner(environment=self.runner.environment, started=self.watch.command_started)
        )
        self.family = family
        self.tables = FamilyTables(
            WatchedTables(self.real, self.watch), 200 if backend is Backend.NFT else None
        )
        self.cluster = Cluster()
        four = family is Family.IPV4
        made = [
            (
                service(name, cluster_ip=f"10.96.0.{n}" if four else f"fd00:96::{n}"),
                slice_of(f"10.244.1.{n}" if four else f"fd00:10:244::{n}", service=name),
            )
            for n, name in enumerate(("a", "b", "c", "d"), 1)
        ]
        # The last one has no endpoints, for a rule in table filter.
        self.cluster.apply(Listed(Kind.SERVICE, tuple(it for it, _ in made)))
        self.cluster.apply(Listed(Kind.ENDPOINT_SLICE, tuple(it for _, it in made[:-1])))
        self.sync()
        assert self.heard == []
        threading.Thread(target=self.watch.run, daemon=True).start()
        self.before = self.real.save()

    def run(self, suffix: str, *arguments: str, text: str = "") -> None:
        """Have somebody else run iptables, or iptables-`suffix`."""
        tools = self.real.tools
        command = {"": tools.main, "restore": tools.restore}.get(suffix, suffix)
        outcome = self.runner.run((command, *arguments), text)
        assert outcome.exit_code == 0, outcome.stderr

    def sync(self, *touched: Key) -> SyncReport:
        on = rule_context(load(DOCUMENT, {}).config, NODE, None, KernelFacts(nfacct=False), self.family)
        report = self.tables.sync(self.cluster, touched, on)
        self.watch.synced(self.family, report.table_counts)
        return report

    def suspected(self) -> bool:
        """Look at what was heard of, as the agent does."""
        schedule = DriftSchedule(1000.0, 0.0)
        heard, self.heard[:] = [*self.heard], []
        for foreign in heard:
            if foreign.family is self.family:
                schedule.external_write(foreign, 0.0)
        suspect = schedule.take(0.0)
        return bool(suspect.tables or suspect.chains) and self.tables.detect_drift(suspect)

    def chains(self, prefix: str, table: str = "nat") -> list[str]:
        return [chain for chain, _ in self.before.of_table(table) if chain.startswith(prefix)]

    def repaired(self) -> dict[str, TableDrift]:
        """What others have done by now is heard of and put right; what was wrong, by table."""
        eventually(self.suspected)
        report = self.sync()
        assert not self.tables.detect_drift(scope(TABLES))
        assert self.heard == []
        return {damage.table: damage for damage in report.drift.tables}

    def is_as_before(self) -> bool:
        return self.real.save().chains == self.before.chains

    def ours_are_as_before(self) -> bool:
        """Chains of ours hold the same, and our jumps are there in their order."""
        live = self.real.save()
        jumps = all(
            [rule for rule in live.chains[key] if rule in wanted] == list(wanted)
            for key, wanted in skeleton.JUMPS.items()
        )
        return jumps and ours(live) == ours(self.before)


def ours(live: Ruleset) -> dict[ChainKey, tuple[str, ...]]:
    return {key: rules for key, rules in live.chains.items() if is_ours(key)}


@pytest.fixture
def node(inside: str, backend: Backend, family: Family, tmp_path: Path) -> Node:
    return Node(backend, family, tmp_path / "lock")


Foul = Callable[[Node], None]


def iptables(line: str) -> Foul:
    """Somebody runs iptables, where SVC, SEP and SVC2 stand for chains of ours."""

    def foul(node: Node) -> None:
        svc, sep = node.chains("KUBE-SVC"), node.chains("KUBE-SEP")
        names = {"SVC": svc[0], "SVC2": svc[1], "SEP": sep[0]}
        node.run("", *(names.get(word, word) for word in shlex.split(line)))

    return foul


def in_turn(*fouls: Foul) -> Foul:
    def foul(node: Node) -> None:
        for one in fouls:
            one(node)

    return foul


FOULS: dict[str, tuple[Foul, dict[str, TableDrift]]] = {
    "a rule deleted": (iptables("-t nat -D SVC 1"), {"nat": TableDrift("nat", rules=1)}),
    "a shared rule deleted": (iptables("-t nat -D KUBE-SERVICES 2"), {"nat": TableDrift("nat", rules=1)}),
    "a filter rule deleted": (
        iptables("-t filter -D KUBE-SERVICES 1"),
        {"filter": TableDrift("filter", rules=1)},
    ),
    "a rule added": (iptables("-t nat -I SEP -p udp -j RETURN"), {"nat": TableDrift("nat", foreign_rules=1)}),
    "a filter rule added": (
        iptables("-t filter -A KUBE-FORWARD -j DROP"),
        {"filter": TableDrift("filter", foreign_rules=1)},
    ),
    "a mangle rule added": (
        iptables("-t mangle -A KUBE-PROXY-CANARY -j DROP"),
        {"mangle": TableDrift("mangle", foreign_rules=1)},
    ),
    "a nat jump removed": (iptables("-t nat -D PREROUTING 1"), {"nat": TableDrift("nat", jumps=1)}),
    "a filter jump removed": (iptables("-t filter -D INPUT 2"), {"filter": TableDrift("filter", jumps=1)}),
    "a chain flushed": (iptables("-t nat -F KUBE-POSTROUTING"), {"nat": TableDrift("nat", rules=3)}),
    "a chain deleted": (
        iptables("-t mangle -X KUBE-PROXY-CANARY"),
        {"mangle": TableDrift("mangle", chains=1)},
    ),
    "a chain of ours made": (
        iptables("-t nat -N KUBE-SVC-STRANGE"),
        {"nat": TableDrift("nat", foreign_chains=1)},
    ),
}


@pytest.mark.parametrize("name", FOULS)
def test_one_thing_wrong(node: Node, name: str) -> None:
    """It is heard of, named, and put right to the letter."""
    foul, damages = FOULS[name]
    foul(node)
    assert node.repaired() == damages
    assert node.is_as_before()


@pytest.mark.parametrize("family", [Family.IPV4], ids=["IPv4"], indirect=True)
def test_our_rule_in_the_kubelets_chain(node: Node) -> None:
    """What keeps neighbours off 127.0.0.0/8: back, and told of, whether the rule or the whole chain was gone."""
    node.run("", "-t", "filter", "-F", "KUBE-FIREWALL")
    assert node.repaired() == {"filter": TableDrift("filter", rules=1)}
    assert node.is_as_before()
    for chain in ("INPUT", "OUTPUT"):
        node.run("", "-t", "filter", "-D", chain, "-j", "KUBE-FIREWALL")
    node.run("", "-t", "filter", "-F", "KUBE-FIREWALL")
    node.run("", "-t", "filter", "-X", "KUBE-FIREWALL")
    assert node.repaired() == {"filter": TableDrift("filter", chains=1, rules=1, jumps=2)}
    assert node.ours_are_as_before()


def test_a_flushed_table(node: Node) -> None:
    """Each by itself, and all of them: as before, but for what others had in them."""
    for tables in (*((table,) for table in TABLES), TABLES):
        for table in tables:
            node.run("", "-t", table, "-F")
            node.run("", "-t", table, "-X")
        assert node.repaired().keys() == set(tables)
        assert node.ours_are_as_before()
        node.run("restore", "--noflush", text=OF_OTHERS)


def test_tables_replaced_by_a_file_of_others(node: Node) -> None:
    """iptables-restore without --noflush: what is theirs stands as in the file, with ours before it."""
    node.run("restore", text=OF_OTHERS)
    assert node.repaired().keys() == set(TABLES)
    assert node.ours_are_as_before()
    live = node.real.save()
    assert live.chains[ChainKey("nat", "CNI-HOSTPORT")] == ("-p tcp -m tcp --dport 7777 -j RETURN",)
    theirs = [rule for rule in live.chains[ChainKey("nat", "PREROUTING")] if "CNI" in rule]
    assert ["first" in theirs[0], "last" in theirs[1], len(theirs)] == [True, True, 2]


def test_what_is_no_business_of_ours(node: Node) -> None:
    """Rules and chains of others come and go: nft wakes nobody, and on neither is anything written."""
    texts = node.real.save()
    node.run("restore", "--noflush", text=OF_OTHERS.replace("CNI-HOSTPORT", "CNI-OTHER"))
    node.run("", "-t", "nat", "-D", "CNI-OTHER", "1")
    if node.real.backend is Backend.NFT:
        node.run("", "-t", "nat", "-I", "KUBE-SERVICES", "-j", "RETURN")
        eventually(lambda: node.heard)
        assert [it.chains for it in node.heard] == [{ChainKey("nat", "KUBE-SERVICES")}]
        assert '"ip' in node.heard[0].writer
    else:
        eventually(lambda: len(node.heard) >= 1)
        assert not node.suspected()
        assert texts.chains.keys() < node.real.save().chains.keys()


@pytest.mark.parametrize("full", [False, True], ids=["partial", "full"])
def test_a_sync_is_no_news(node: Node, full: bool) -> None:
    """Whatever others have in the tables by then; not even if it is only seen in the course of the sync."""
    node.run("", "-t", "nat", "-A", "PREROUTING", "-j", "CNI-HOSTPORT")
    eventually(lambda: node.heard or node.real.backend is Backend.NFT)
    node.heard.clear()
    node.cluster.apply(Deleted(Kind.SERVICE, Key("ns", "c")))
    if full:
        node.tables.require_resync()
    node.sync(Key("ns", "c"))
    assert node.heard == []


def test_others_write_while_all_is_read(node: Node) -> None:
    """Between the reading and the writing of a full sync: heard of, as nothing else would put it right."""

    class Meddled:
        def __getattr__(self, name: str) -> object:
            return getattr(node.real, name)

        def save(self, tables: Collection[str] | None = None) -> Ruleset:
            live = node.real.save(tables)
            node.run("", "-t", "filter", "-D", "FORWARD", "1")
            return live

    reader, node.tables._reader = node.tables._reader, TableReader(Meddled())  # type: ignore[arg-type]
    node.tables.require_resync()
    node.sync()
    node.tables._reader = reader
    assert node.repaired() == {"filter": TableDrift("filter", jumps=1)}
    assert node.is_as_before()


_IN_A_CONTAINER = r"""
import sys, threading
from pykubeproxy.kernel import Backend, Runner, WatchedTables, open_iptables, watch_tables
from pykubeproxy.objects import Family
heard = []
watch = watch_tables(Backend.NFT, heard.append)
threading.Thread(target=watch.run, daemon=True).start()
tables = WatchedTables(open_iptables(Backend.NFT, Family.IPV4, Runner(started=watch.command_started)), watch)
for n in range(10):
    tables.restore(f"*nat\n:KUBE-SVC-{n} - [0:0]\n-A KUBE-SVC-{n} -j RETURN\nCOMMIT\n")
print(len(heard), flush=True)
sys.stdin.readline()
print(*(f"{sorted(it.chains)} {it.writer}" for it in heard))
"""


def test_as_a_container(inside: str) -> None:
    """With process numbers of its own it tells its own writes from those of others, whom it names as the node does."""
    command = (
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        sys.executable,
        "-c",
        _IN_A_CONTAINER,
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout
        assert watching.stdout.readline() == "0\n"
        with subprocess.Popen(["iptables-nft", "-t", "nat", "-F", "KUBE-SVC-3"]) as other:
            assert other.wait() == 0
        out, _ = watching.communicate("\n", timeout=30)
    assert out == f'{[ChainKey("nat", "KUBE-SVC-3")]} "iptables-nft" (process {other.pid})\n'


def test_own_writes_are_no_news(node: Node) -> None:
    """Neither short ones nor long ones, at whose end others are heard again."""
    long = "".join(f"-A KUBE-SVC-LONG -s 10.{n // 250}.{n % 250}.0/24 -j RETURN\n" for n in range(8000))
    if node.family is Family.IPV6:
        long = long.replace("-s 10.", "-s fd00::").replace(".0/24", "/128").replace(".", ":")
    for text in ("", long):
        with_text = f"*nat\n:KUBE-SVC-LONG - [0:0]\n{text}-A KUBE-SVC-LONG -j RETURN\nCOMMIT\n"
        WatchedTables(node.real, node.watch).restore(with_text)
        WatchedTables(node.real, node.watch).restore(
            "*nat\n:KUBE-SVC-LONG - [0:0]\n-X KUBE-SVC-LONG\nCOMMIT\n"
        )
    assert node.heard == []
    node.run("", "-t", "nat", "-D", "KUBE-SERVICES", "1")
    assert node.repaired() == {"nat": TableDrift("nat", rules=1)}


def test_others_write_while_we_do(node: Node) -> None:
    """Right after our own change is in force, before anybody could look: heard of all the same."""

    class Meddled:
        def __getattr__(self, name: str) -> object:
            return getattr(node.real, name)

        @contextmanager
        def session(self) -> Iterator[RestoreSession]:
            with node.real.session() as session:
                yield session
            node.run("", "-t", "nat", "-D", "KUBE-POSTROUTING", "1")

    node.cluster.apply(Deleted(Kind.SERVICE, Key("ns", "c")))
    tables, node.tables._tables = node.tables._tables, WatchedTables(Meddled(), node.watch)  # type: ignore[arg-type]
    node.sync(Key("ns", "c"))
    node.tables._tables = tables
    assert node.repaired() == {"nat": TableDrift("nat", rules=1)}


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_a_rule_that_iptables_cannot_show(node: Node) -> None:
    """Made with nft, in a chain of ours: taken out."""
    family = "ip" if node.family is Family.IPV4 else "ip6"
    node.run("nft", *f"add rule {family} nat KUBE-SERVICES ct mark set numgen random mod 7".split())
    node.repaired()
    assert node.is_as_before()


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_beside_a_rule_that_iptables_cannot_show(node: Node) -> None:
    """Made with nft, in a built-in chain: it stays, ours are kept in order around it, by partial syncs and full ones."""
    family = "ip" if node.family is Family.IPV4 else "ip6"
    node.run("nft", *f"add rule {family} nat PREROUTING ct mark set numgen random mod 7".split())
    node.run("", "-t", "nat", "-D", "PREROUTING", *shlex.split(skeleton.JUMPS[PREROUTING][0]))
    node.run("", "-t", "nat", "-D", "KUBE-SERVICES", "1")
    node.run("", "-t", "filter", "-F", "KUBE-FORWARD")
    eventually(node.suspected)
    repaired = {it.table: it for it in node.sync().drift.tables}
    assert repaired["nat"] == TableDrift("nat", jumps=1, rules=1)
    assert repaired.keys() == {"nat", "filter"}
    assert not node.tables.detect_drift(scope())
    node.tables.require_resync()
    node.sync()
    listed = node.runner.run(("nft", "list", "chain", family, "nat", "PREROUTING")).stdout
    assert (listed.count("numgen"), listed.count("jump KUBE-SERVICES")) == (1, 1)
    node.run("nft", "flush", "chain", family, "nat", "PREROUTING")
    node.run(
        "restore",
        "--noflush",
        text=OF_OTHERS.partition("-A CNI")[0].replace(":CNI-HOSTPORT - [0:0]\n", "") + "COMMIT\n",
    )
    node.repaired()
    assert node.is_as_before()


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
@pytest.mark.parametrize("chain", ["KUBE-SERVICES", "KUBE-MARK-MASQ", "SVC"])
def test_a_renamed_chain(node: Node, chain: str) -> None:
    """The kernel tells its new name alone, which need not look like ours."""
    old = node.chains("KUBE-SVC")[0] if chain == "SVC" else chain
    node.run("", "-t", "nat", "-E", old, "SOMETHING")
    assert node.repaired()["nat"].chains == 1
    assert node.ours_are_as_before()


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_what_wakes_nobody(node: Node) -> None:
    """New chains of others, policies, counters: nothing of it concerns us."""
    node.run("", "-t", "nat", "-N", "CNI-NEW")
    node.run("restore", "--noflush", text="*nat\n:POSTROUTING DROP [7:7]\n:CNI-NEWER - [0:0]\nCOMMIT\n")
    node.run("", "-t", "filter", "-P", "FORWARD", "DROP")
    node.run("", "-t", "nat", "-Z", "KUBE-SERVICES")
    node.run("", "-t", "nat", "-D", "KUBE-SERVICES", "1")
    eventually(lambda: node.heard)
    assert [(it.tables, it.chains) for it in node.heard] == [
        (frozenset(), {ChainKey("nat", "KUBE-SERVICES")})
    ]


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_everything_flushed_with_nft(node: Node) -> None:
    """No table is left, and all are back."""
    node.run("nft", "flush", "ruleset")
    assert node.repaired().keys() == set(TABLES)
    assert node.ours_are_as_before()


@pytest.mark.parametrize("backend", [Backend.LEGACY], ids=["legacy"], indirect=True)
def test_a_rule_replaced_by_one_of_its_size(node: Node) -> None:
    """No size tells of it; the comparison of everything does."""
    node.run(
        "",
        "-t",
        "nat",
        "-R",
        "KUBE-POSTROUTING",
        "1",
        *["-m", "mark", "!", "--mark", "0x8000/0x8000", "-j", "RETURN"],
    )
    assert node.tables.detect_drift(scope())
    assert node.sync().drift.tables == (TableDrift("nat", rules=1, foreign_rules=1),)
    assert node.is_as_before()


@pytest.mark.parametrize("backend", [Backend.LEGACY], ids=["legacy"], indirect=True)
def test_looking_creates_no_table(inside: str, family: Family, backend: Backend) -> None:
    """Before anything is written there is none, and none comes of it."""
    heard: list[ExternalWrite] = []
    watch = watch_tables(backend, heard.append)
    with watch.own_writes(family):
        pass
    assert legacy_tables(family) == ()
