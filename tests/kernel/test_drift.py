"""Detect, report and repair drift in real tables; foreign rules are kept."""

import errno
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from pykubeproxy.agent.drift import DriftSchedule, TableReader
from pykubeproxy.agent.notices import SyncReport
from pykubeproxy.agent.write import SyncFailed
from pykubeproxy.kernel import (
    TABLES,
    Backend,
    ExternalWrite,
    Runner,
    netlink,
    open_iptables,
    watch_tables,
)
from pykubeproxy.kernel.legacy import legacy_tables
from pykubeproxy.objects import Deleted, Event, Family, Key, Kind, Listed
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.drift import TableDrift
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from tests.fakes.drift import scope
from tests.fakes.synced import SyncedFamily, flags_context
from tests.fakes.waiting import PATIENCE, eventually
from tests.objects import service, slice_of

pytestmark = pytest.mark.root

FOREIGN = """*nat
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


class Node:
    """Tables of one family with the rules of four services and foreign rules, and a watch on them."""

    def __init__(self, backend: Backend, family: Family, lock: Path) -> None:
        self.runner = Runner(environment={"XTABLES_LOCKFILE": str(lock)})
        self.real = open_iptables(backend, family, self.runner)
        self.run("restore", "--noflush", text=FOREIGN)
        self.external_writes: list[ExternalWrite] = []
        self.watch = watch_tables(backend, self.external_writes.append)
        self.real = open_iptables(
            backend, family, Runner(environment=self.runner.environment, started=self.watch.command_started)
        )
        self.family = family
        self.watched = msgspec.structs.replace(self.real, own_writes=self.watch.own_writes)
        context = flags_context(family, False, cluster_cidr="10.244.0.0/16,fd00:10:244::/64")
        self.synced = SyncedFamily(context=context, live=self.watched)
        self.tables = self.synced.tables
        four = family is Family.IPV4
        made = [
            (
                service(name, cluster_ip=f"10.96.0.{n}" if four else f"fd00:96::{n}"),
                slice_of(f"10.244.1.{n}" if four else f"fd00:10:244::{n}", service=name),
            )
            for n, name in enumerate(("a", "b", "c", "d"), 1)
        ]
        # The last service has no endpoints, so table filter has a rule.
        self.sync(
            Listed(Kind.SERVICE, tuple(it for it, _ in made)),
            Listed(Kind.ENDPOINT_SLICE, tuple(it for _, it in made[:-1])),
        )
        assert self.external_writes == []
        threading.Thread(target=self.watch.run, daemon=True).start()
        self.before = self.real.save()

    def run(self, suffix: str, *arguments: str, text: str = "") -> None:
        """Run iptables, or another command, as an external program."""
        tools = self.real.tools
        command = {"": tools.main, "restore": tools.restore}.get(suffix, suffix)
        outcome = self.runner.run((command, *arguments), text)
        assert outcome.exit_code == 0, outcome.stderr

    def sync(self, *events: Event) -> SyncReport:
        report = self.synced.sync(*events)
        self.watch.synced(self.family, report.table_counts)
        return report

    def detects_drift(self) -> bool:
        """Check what the watch reported, as the agent does."""
        schedule = DriftSchedule(1000.0, 0.0)
        external_writes, self.external_writes[:] = [*self.external_writes], []
        for write in external_writes:
            if write.family is self.family:
                schedule.external_write(write, 0.0)
        drift_scope = schedule.take(0.0)
        return bool((drift_scope.tables or drift_scope.chains) and self.tables.note_drift(drift_scope))

    def chains(self, prefix: str, table: str = "nat") -> list[str]:
        return [chain for chain, _ in self.before.of_table(table) if chain.startswith(prefix)]

    def wait_for_drift(self) -> None:
        """Wait until all drift is reported."""
        with self.watch.own_writes(self.family):
            pass  # the watch reports all foreign writes first: on legacy, the next poll may see the last ones
        eventually(self.detects_drift)

    def repair(self) -> dict[str, TableDrift]:
        """Wait for reported drift and repair it; return the drift by table."""
        self.wait_for_drift()
        report = self.sync()
        assert not self.tables.note_drift(scope(TABLES))
        assert self.external_writes == []
        return {drift.table: drift for drift in report.drift}

    def is_unchanged(self) -> bool:
        return self.real.save().chains == self.before.chains

    def ours_are_unchanged(self) -> bool:
        """Return whether our chains are unchanged and our jumps are in order."""
        live = self.real.save()
        jumps = all(
            [rule for rule in live.chains[key] if rule in expected] == list(expected)
            for key, expected in skeleton.JUMPS.items()
        )
        return jumps and ours(live) == ours(self.before)


def ours(live: Ruleset) -> dict[ChainKey, tuple[str, ...]]:
    return {key: rules for key, rules in live.chains.items() if is_ours(key)}


@pytest.fixture
def node(inside: str, backend: Backend, family: Family, tmp_path: Path) -> Node:
    return Node(backend, family, tmp_path / "lock")


Tampering = Callable[[Node], None]


def iptables(line: str) -> Tampering:
    """Return a tampering that runs iptables; SVC, SVC2 and SEP stand for chains of ours."""

    def tamper(node: Node) -> None:
        svc, sep = node.chains("KUBE-SVC"), node.chains("KUBE-SEP")
        names = {"SVC": svc[0], "SVC2": svc[1], "SEP": sep[0]}
        node.run("", *(names.get(word, word) for word in shlex.split(line)))

    return tamper


def in_order(*tamperings: Tampering) -> Tampering:
    def tamper(node: Node) -> None:
        for tampering in tamperings:
            tampering(node)

    return tamper


TAMPERINGS: dict[str, tuple[Tampering, dict[str, TableDrift]]] = {
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


@pytest.mark.parametrize("name", TAMPERINGS)
def test_each_kind_of_drift_is_repaired(node: Node, name: str) -> None:
    """The watch reports it, and the report counts it exactly."""
    tamper, expected = TAMPERINGS[name]
    tamper(node)
    assert node.repair() == expected
    assert node.is_unchanged()


@pytest.mark.parametrize("family", [Family.IPV4], ids=["IPv4"], indirect=True)
def test_our_rule_in_the_kubelets_chain_is_repaired(node: Node) -> None:
    """Whether the rule or the whole chain was deleted. It protects 127.0.0.0/8."""
    node.run("", "-t", "filter", "-F", "KUBE-FIREWALL")
    assert node.repair() == {"filter": TableDrift("filter", rules=1)}
    assert node.is_unchanged()
    for chain in ("INPUT", "OUTPUT"):
        node.run("", "-t", "filter", "-D", chain, "-j", "KUBE-FIREWALL")
    node.run("", "-t", "filter", "-F", "KUBE-FIREWALL")
    node.run("", "-t", "filter", "-X", "KUBE-FIREWALL")
    assert node.repair() == {"filter": TableDrift("filter", chains=1, rules=1, jumps=2)}
    assert node.ours_are_unchanged()


def test_flushed_tables_are_repaired(node: Node) -> None:
    """One table at a time, and all of them."""
    for tables in (*((table,) for table in TABLES), TABLES):
        for table in tables:
            node.run("", "-t", table, "-F")
            node.run("", "-t", table, "-X")
        assert node.repair().keys() == set(tables)
        assert node.ours_are_unchanged()
        node.run("restore", "--noflush", text=FOREIGN)


def test_tables_replaced_by_a_foreign_file_are_repaired(node: Node) -> None:
    """Foreign rules stay as in the file, after our jumps."""
    node.run("restore", text=FOREIGN)
    assert node.repair().keys() == set(TABLES)
    assert node.ours_are_unchanged()
    live = node.real.save()
    assert live.chains[ChainKey("nat", "CNI-HOSTPORT")] == ("-p tcp -m tcp --dport 7777 -j RETURN",)
    foreign = [rule for rule in live.chains[ChainKey("nat", "PREROUTING")] if "CNI" in rule]
    assert ["first" in foreign[0], "last" in foreign[1], len(foreign)] == [True, True, 2]


def test_foreign_rules_and_chains_are_no_drift(node: Node) -> None:
    """nft does not even report them."""
    before = node.real.save()
    node.run("restore", "--noflush", text=FOREIGN.replace("CNI-HOSTPORT", "CNI-OTHER"))
    node.run("", "-t", "nat", "-D", "CNI-OTHER", "1")
    if node.real.backend is Backend.NFT:
        node.run("", "-t", "nat", "-I", "KUBE-SERVICES", "-j", "RETURN")
        eventually(lambda: node.external_writes)
        assert [write.chains for write in node.external_writes] == [{ChainKey("nat", "KUBE-SERVICES")}]
        assert '"ip' in node.external_writes[0].writer
    else:
        eventually(lambda: len(node.external_writes) >= 1)
        assert not node.detects_drift()
        assert before.chains.keys() < node.real.save().chains.keys()


@pytest.mark.parametrize("full", [False, True], ids=["partial", "full"])
def test_a_sync_reports_no_external_write(node: Node, full: bool) -> None:
    """Even with foreign changes in the tables that the sync sees first."""
    node.run("", "-t", "nat", "-A", "PREROUTING", "-j", "CNI-HOSTPORT")
    eventually(lambda: node.external_writes or node.real.backend is Backend.NFT)
    node.external_writes.clear()
    if full:
        node.tables.distrust()
    node.sync(Deleted(Kind.SERVICE, Key("ns", "c")))
    assert node.external_writes == []


def test_a_write_between_read_and_write_of_a_full_sync_is_reported(node: Node) -> None:
    """Nothing else would repair it."""

    class TamperedTables:
        def __getattr__(self, name: str) -> object:
            return getattr(node.real, name)

        def save(self, tables: Collection[str] | None = None) -> Ruleset:
            live = node.real.save(tables)
            node.run("", "-t", "filter", "-D", "FORWARD", "1")
            return live

    reader, node.tables._reader = node.tables._reader, TableReader(TamperedTables())  # type: ignore[arg-type]
    node.tables.distrust()
    node.sync()
    node.tables._reader = reader
    assert node.repair() == {"filter": TableDrift("filter", jumps=1)}
    assert node.is_unchanged()


_WATCHER = r"""
import sys, threading
from msgspec.structs import replace
from pykubeproxy.kernel import Backend, Runner, open_iptables, watch_tables
from pykubeproxy.objects import Family
writes = []
watch = watch_tables(Backend.NFT, writes.append)
threading.Thread(target=watch.run, daemon=True).start()
tables = open_iptables(Backend.NFT, Family.IPV4, Runner(started=watch.command_started))
tables = replace(tables, own_writes=watch.own_writes)
for n in range(10):
    tables.restore(f"*nat\n:KUBE-SVC-{n} - [0:0]\n-A KUBE-SVC-{n} -j RETURN\nCOMMIT\n")
print(len(writes), flush=True)
sys.stdin.readline()
print(*(f"{sorted(write.chains)} {write.writer}" for write in writes))
"""


def test_writers_are_recognized_across_pid_namespaces(inside: str) -> None:
    """The agent's own writes are ignored. Others have their pid on the node, which a test in a namespace does not know."""
    command = (
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        sys.executable,
        "-c",
        _WATCHER,
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout
        assert watcher.stdout.readline() == "0\n"
        subprocess.run(["iptables-nft", "-t", "nat", "-F", "KUBE-SVC-3"], check=True)
        out, _ = watcher.communicate("\n", timeout=PATIENCE)
    wanted = re.escape(f'{[ChainKey("nat", "KUBE-SVC-3")]} "iptables-nft" (process ')
    assert re.fullmatch(wanted + r"\d+\)\n", out)


def test_own_writes_are_not_reported(node: Node) -> None:
    """Neither short nor long ones; later writes of others are."""
    long = "".join(f"-A KUBE-SVC-LONG -s 10.{n // 250}.{n % 250}.0/24 -j RETURN\n" for n in range(8000))
    if node.family is Family.IPV6:
        long = long.replace("-s 10.", "-s fd00::").replace(".0/24", "/128").replace(".", ":")
    for text in ("", long):
        with_text = f"*nat\n:KUBE-SVC-LONG - [0:0]\n{text}-A KUBE-SVC-LONG -j RETURN\nCOMMIT\n"
        node.watched.restore(with_text)
        node.watched.restore("*nat\n:KUBE-SVC-LONG - [0:0]\n-X KUBE-SVC-LONG\nCOMMIT\n")
    assert node.external_writes == []
    node.run("", "-t", "nat", "-D", "KUBE-SERVICES", "1")
    assert node.repair() == {"nat": TableDrift("nat", rules=1)}


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_a_watch_that_failed_after_our_own_write_reports_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot tell who wrote meanwhile, and it takes no later process for ours."""

    def fail(*_: object) -> bytes:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    with pytest.raises(OSError, match="No buffer space"), node.watch.own_writes(node.family) as note:
        note("#" * (1 << 18) + "#")
        monkeypatch.setattr(netlink, "netfilter_request", fail)
    monkeypatch.undo()
    assert node.external_writes == [ExternalWrite.anywhere(family) for family in Family]
    node.external_writes.clear()
    write = shlex.join([node.real.tools.main, "-t", "nat", "-F", "KUBE-SERVICES"])
    with subprocess.Popen(["sh", "-c", f"read _; exec {write}"], stdin=subprocess.PIPE) as other:
        node.watch.command_started(other.pid)
        assert other.stdin
        other.stdin.write(b"\n")
    eventually(lambda: bool(node.external_writes))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failing_watch_fails_the_sync(node: Node, when: str) -> None:
    """The error is a SyncFailed, so the agent retries instead of ending."""

    @contextmanager
    def failing(family: Family) -> Iterator[Callable[[str], None]]:
        if when == "after":
            with node.watch.own_writes(family) as note:
                yield note
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    node.tables._tables = msgspec.structs.replace(node.watched, own_writes=failing)
    with pytest.raises(SyncFailed, match="cannot watch the tables while writing to them: No buffer space"):
        node.sync(Deleted(Kind.SERVICE, Key("ns", "c")))
    node.tables._tables = node.watched
    node.sync()
    node.tables.distrust()
    assert not node.sync().wrote


def test_a_write_right_after_our_own_is_reported(node: Node) -> None:
    """Also if it comes before the agent reads the tables."""

    @contextmanager
    def then_tampered(family: Family) -> Iterator[Callable[[str], None]]:
        with node.watch.own_writes(family) as note:
            yield note
            node.run("", "-t", "nat", "-D", "KUBE-POSTROUTING", "1")

    node.tables._tables = msgspec.structs.replace(node.watched, own_writes=then_tampered)
    node.sync(Deleted(Kind.SERVICE, Key("ns", "c")))
    node.tables._tables = node.watched
    assert node.repair() == {"nat": TableDrift("nat", rules=1)}


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_a_native_nft_rule_in_our_chain_is_removed(node: Node) -> None:
    family = "ip" if node.family is Family.IPV4 else "ip6"
    node.run("nft", *f"add rule {family} nat KUBE-SERVICES ct mark set numgen random mod 7".split())
    node.repair()
    assert node.is_unchanged()


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_a_native_nft_rule_in_a_built_in_chain_is_kept(node: Node) -> None:
    """Partial and full syncs keep our rules in order around it."""
    family = "ip" if node.family is Family.IPV4 else "ip6"
    node.run("nft", *f"add rule {family} nat PREROUTING ct mark set numgen random mod 7".split())
    node.run("", "-t", "nat", "-D", "PREROUTING", *shlex.split(skeleton.JUMPS[PREROUTING][0]))
    node.run("", "-t", "nat", "-D", "KUBE-SERVICES", "1")
    node.run("", "-t", "filter", "-F", "KUBE-FORWARD")
    node.wait_for_drift()
    repair = {table.table: table for table in node.sync().drift}
    assert repair["nat"] == TableDrift("nat", jumps=1, rules=1)
    assert repair.keys() == {"nat", "filter"}
    assert not node.tables.note_drift(scope())
    node.tables.distrust()
    node.sync()
    listed = node.runner.run(("nft", "list", "chain", family, "nat", "PREROUTING")).stdout
    assert (listed.count("numgen"), listed.count("jump KUBE-SERVICES")) == (1, 1)
    node.run("nft", "flush", "chain", family, "nat", "PREROUTING")
    node.run(
        "restore",
        "--noflush",
        text=FOREIGN.partition("-A CNI")[0].replace(":CNI-HOSTPORT - [0:0]\n", "") + "COMMIT\n",
    )
    node.repair()
    assert node.is_unchanged()


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
@pytest.mark.parametrize("chain", ["KUBE-SERVICES", "KUBE-MARK-MASQ", "SVC"])
def test_a_renamed_chain_is_repaired(node: Node, chain: str) -> None:
    """The kernel reports the new name only, which need not look like ours."""
    old = node.chains("KUBE-SVC")[0] if chain == "SVC" else chain
    node.run("", "-t", "nat", "-E", old, "SOMETHING")
    assert node.repair()["nat"].chains == 1
    assert node.ours_are_unchanged()


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_irrelevant_changes_are_not_reported(node: Node) -> None:
    """Foreign chains, policies and counters."""
    node.run("", "-t", "nat", "-N", "CNI-NEW")
    node.run("restore", "--noflush", text="*nat\n:POSTROUTING DROP [7:7]\n:CNI-NEWER - [0:0]\nCOMMIT\n")
    node.run("", "-t", "filter", "-P", "FORWARD", "DROP")
    node.run("", "-t", "nat", "-Z", "KUBE-SERVICES")
    node.run("", "-t", "nat", "-D", "KUBE-SERVICES", "1")
    eventually(lambda: node.external_writes)
    assert [(write.tables, write.chains) for write in node.external_writes] == [
        (frozenset[str](), frozenset({ChainKey("nat", "KUBE-SERVICES")}))
    ]


@pytest.mark.parametrize("backend", [Backend.NFT], ids=["nft"], indirect=True)
def test_a_flushed_ruleset_is_repaired(node: Node) -> None:
    """After `nft flush ruleset` no table is left."""
    node.run("nft", "flush", "ruleset")
    assert node.repair().keys() == set(TABLES)
    assert node.ours_are_unchanged()


@pytest.mark.parametrize("backend", [Backend.LEGACY], ids=["legacy"], indirect=True)
def test_a_rule_replaced_by_one_of_equal_size_is_repaired(node: Node) -> None:
    """Sizes are equal, so only the periodic check finds it."""
    node.run(
        "",
        "-t",
        "nat",
        "-R",
        "KUBE-POSTROUTING",
        "1",
        *["-m", "mark", "!", "--mark", "0x8000/0x8000", "-j", "RETURN"],
    )
    assert node.tables.note_drift(scope())
    assert node.sync().drift == (TableDrift("nat", rules=1, foreign_rules=1),)
    assert node.is_unchanged()


@pytest.mark.parametrize("backend", [Backend.LEGACY], ids=["legacy"], indirect=True)
def test_the_watch_creates_no_legacy_table(inside: str, family: Family, backend: Backend) -> None:
    external_writes: list[ExternalWrite] = []
    watch = watch_tables(backend, external_writes.append)
    with watch.own_writes(family):
        pass
    assert legacy_tables(family) == ()
