"""The agent takes over rules and repairs drift within a second, reports it, and backs off if drift is contested."""

import shlex
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from pykubeproxy.lab.apiserver import EVENTS, ApiServer
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.process import HEALTH, answers, inside_a_namespace, metric, running, saved, status
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

FOREIGN = """*{table}
-A {chain} -p tcp -m tcp --dport 7777 -j ACCEPT
COMMIT
"""
FLUSHED, FOREIGN_FILE = "every table flushed", "a foreign file without --noflush"
# External changes, made in each family: arguments of iptables, or a restore file for all tables.
TAMPERINGS = (
    "-t nat -D KUBE-SERVICES 1",
    "-t filter -A KUBE-FORWARD -j DROP",
    "-t nat -D OUTPUT 1",
    "-t nat -F KUBE-POSTROUTING",
    "-t mangle -X KUBE-PROXY-CANARY",
    "-t filter -F",
    "-t nat -F",
    FLUSHED,
    FOREIGN_FILE,
)


class Site(NamedTuple):
    """An agent in a namespace, its API server and its iptables."""

    api: ApiServer
    backend: str
    log: Path

    def iptables(self, family: int, arguments: str, text: str = "") -> None:
        command = f"ip{'' if family == 4 else '6'}tables-{self.backend}"
        if text:
            command, arguments = f"{command}-restore", ""
        waiting = ["-w", "5"] if self.backend == "legacy" else []
        subprocess.run([command, *waiting, *shlex.split(arguments)], input=text, text=True, check=True)

    def ours(self, family: int) -> dict[str, list[str]]:
        """Return the rules of our chains and our jumps, by table and chain."""
        live: dict[str, list[str]] = {}
        table = ""
        for line in saved(f"ip{'' if family == 4 else '6'}tables-{self.backend}-save"):
            if line.startswith("*"):
                table = line
            elif line.startswith(":KUBE-"):
                live[f"{table} {line[1:].split()[0]}"] = []
            elif line.startswith("-A") and "KUBE-" in line:
                live.setdefault(f"{table} {line.split()[1]}", []).append(line)
        return live

    def tamper(self, family: int, tampering: str) -> None:
        if tampering.startswith("-"):
            self.iptables(family, tampering)
        elif tampering == FLUSHED:
            for table in ("nat", "filter", "mangle"):
                for flag in ("-F", "-X"):
                    self.iptables(family, f"-t {table} {flag}")
        else:
            tables = {"nat": "PREROUTING", "filter": "INPUT", "mangle": "OUTPUT"}.items()
            text = "".join(FOREIGN.format(table=table, chain=chain) for table, chain in tables)
            self.iptables(family, "", text)

    def reasons(self) -> list[str]:
        """Return the reasons of the events of drift."""
        return [event["reason"] for event in self.api.store.list(EVENTS) if "Drift" in event["reason"]]


@pytest.fixture(params=["nft", "legacy"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@contextmanager
def site(backend: str, tmp_path: Path, before: str = "") -> Iterator[Site]:
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        for number, name in enumerate(("web", "shop"), 10):
            api.store.create(
                service(
                    name,
                    clusterIPs=[f"10.96.0.{number}", f"fd00:96::{number}"],
                    ipFamilies=["IPv4", "IPv6"],
                    ipFamilyPolicy="RequireDualStack",
                )
            )
        api.store.create(slice_of("web", "10.244.0.5", "10.244.0.6"))
        flags = ("--hostname-override=node1", f"--iptables-backend={backend}", "--master", api.url)
        log = tmp_path / f"{time.monotonic_ns()}.log"
        with running(log, *flags, before=before) as process:
            eventually(lambda: answers(HEALTH, "/readyz", 200))
            yield Site(api, backend, log)
            assert process.poll() is None


@pytest.fixture(autouse=True)
def lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the test and its agent their own lock of the legacy tables."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))


# So that no repair counts as contested.
_MANY_REPAIRS = "from pykubeproxy.agent import drift; drift._REPAIRS_AT_ONCE = 1000"


def test_drift_is_repaired_at_once(backend: str, tmp_path: Path) -> None:
    """Each kind of drift in both families."""
    durations: list[float] = []
    with site(backend, tmp_path, _MANY_REPAIRS) as at:
        before = {family: at.ours(family) for family in (4, 6)}
        for tampering in TAMPERINGS:
            for family in (4, 6):
                at.tamper(family, tampering)
                begun = time.monotonic()
                assert tampering in (FLUSHED, FOREIGN_FILE) or at.ours(family) != before[family]
                eventually(lambda: at.ours(family) == before[family])
                durations.append(time.monotonic() - begun)
        assert answers(HEALTH, "/healthz", 200)
    # Without the watch, repairs would take a sync period of 30 s.
    assert statistics.median(durations) < 15


def test_repairs_are_reported(backend: str, tmp_path: Path) -> None:
    """In log, metrics, status and an event on the Node; with the writer on nft."""
    with site(backend, tmp_path) as at:
        at.iptables(4, "-t nat -D KUBE-SERVICES 1")
        eventually(lambda: metric('pykubeproxy_drift_repairs_total{ip_family="IPv4",table="nat"}') == 1)
        assert metric('pykubeproxy_drift_repair_duration_seconds_count{ip_family="IPv4"}') == 1
        assert "drift repaired" in at.log.read_text()
        (repair,) = status().repairs
        assert (repair.family, repair.what) == ("IPv4", "nat: 1 rule missing")
        assert repair.writers == () if backend == "legacy" else "iptables" in repair.writers[0]
        eventually(lambda: at.reasons() == ["DriftRepaired"])
        (event,) = (event for event in at.api.store.list(EVENTS) if event["reason"] == "DriftRepaired")
        assert event["regarding"]["name"] == "node1"
        assert "nat: 1 rule missing" in event["note"]


_CONTEST = ["DriftContested", "DriftCalm"]
# Rules that are missing for a second, not five, make the node not ready.
_SHORT_TIMES = """
from pykubeproxy.agent import drift
from pykubeproxy.agent.observe import health
drift._CALM, health._MISSING_AFTER = 1.0, 1.0
"""


def test_contested_repairs_back_off(tmp_path: Path) -> None:
    """An alert, an event and `status` say so; the node is not ready only while its rules are missing for seconds."""
    with site("nft", tmp_path, _SHORT_TIMES) as at:
        before, stop, begun = at.ours(4), threading.Event(), time.monotonic()

        def undo() -> None:
            while not stop.wait(0.1):
                at.iptables(4, "-t nat -F KUBE-SERVICES")

        thread = threading.Thread(target=undo)
        thread.start()
        eventually(lambda: metric('pykubeproxy_drift_contested{ip_family="IPv4"}') == 1)
        # A repair that waits for 2 s leaves the node without its rules for longer than 1 s.
        eventually(lambda: all(answers(HEALTH, page, 503) for page in ("/readyz", "/healthz")))
        assert answers(HEALTH, "/livez", 200)
        # Three at once and one after a pause; later ones are limited by the backoff.
        assert metric("pykubeproxy_drift_repairs_total") <= 4 + (time.monotonic() - begun)
        stop.set()
        thread.join()
        eventually(lambda: at.ours(4) == before)
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        assert metric('pykubeproxy_drift_contested{ip_family="IPv4"}') == 1
        assert [family.contested for family in status().families].count(True) == 1
        eventually(lambda: "drift no longer contested" in at.log.read_text())
        eventually(lambda: [reason for reason in at.reasons() if reason != "DriftRepaired"] == _CONTEST)


def test_drift_during_syncs_is_repaired(backend: str, tmp_path: Path) -> None:
    """The rules end up as after a fresh start."""
    with site(backend, tmp_path) as at:
        for number in range(20, 32):
            at.api.store.create(service(f"s{number}", clusterIP=f"10.96.0.{number}"))
            at.api.store.create(slice_of(f"s{number}", f"10.244.1.{number}"))
            if number % 5 == 0:
                at.tamper(4, FOREIGN_FILE)
        eventually(lambda: any("10.244.1.31:8080" in rule for rule in saved(f"iptables-{backend}-save")))
        eventually(lambda: len(at.ours(4).get("*nat KUBE-SERVICES", ())) == 12 + 1 + 1)
        eventually(lambda: "*filter KUBE-FORWARD" in at.ours(4))
        rules = at.ours(4)
    with site(backend, tmp_path) as at:
        for number in range(20, 32):
            at.api.store.create(service(f"s{number}", clusterIP=f"10.96.0.{number}"))
            at.api.store.create(slice_of(f"s{number}", f"10.244.1.{number}"))
        eventually(lambda: at.ours(4) == rules)


LEFT = """
table ip kube-proxy {
    chain services { type nat hook prerouting priority dstnat; ip daddr 10.96.0.10 dnat to 10.244.0.5; }
}
table ip6 kube-proxy {
    chain services { type nat hook prerouting priority dstnat; }
}
"""
EARLIER_RULES = """
table ip mine { }
table inet kube-proxy { }
"""


FIREWALL = "-A KUBE-FIREWALL -s 192.0.2.1/32 -j DROP"
OLD_BACKEND = f"""*filter
:KUBE-SERVICES - [0:0]
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
{FIREWALL}
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:MINE - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.10/32 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A MINE -j ACCEPT
COMMIT
"""


def tables() -> set[str]:
    listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    return set(listed.splitlines())


def test_kube_proxys_tables_are_removed_after_the_first_sync(tmp_path: Path) -> None:
    """They serve until then, and are removed again when they return; foreign tables stay."""
    with inside_a_namespace(), server() as api:
        subprocess.run(["nft", "-f", "-"], input=LEFT + EARLIER_RULES, text=True, check=True)
        before = tables()
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("web", clusterIP="10.96.0.10"))
        api.store.create(slice_of("web", "10.244.0.5"))
        api.faults.fail(500, times=1000, path="/endpointslices")
        with running(tmp_path / "log", "--master", api.url, "--hostname-override=node1"):
            eventually(lambda: answers(HEALTH, "/livez", 200))
            api.requests.wait(2, "list", "endpointslices.discovery.k8s.io")
            assert before <= tables()
            assert not any("KUBE-SVC" in rule for rule in saved())
            api.faults.clear()
            # At any time, one of the two serves.
            eventually(lambda: "table ip kube-proxy" not in tables())
            assert any("-d 10.96.0.10/32" in rule for rule in saved())
            eventually(lambda: "table ip6 kube-proxy" not in tables())
            assert tables() >= {"table ip mine", "table inet kube-proxy"}
            # A kube-proxy that ran a moment longer writes them again.
            subprocess.run(["nft", "-f", "-"], input=LEFT, text=True, check=True)
            eventually(lambda: not {"table ip kube-proxy", "table ip6 kube-proxy"} & tables())
            removed = "kube-proxy nftables table removed"  # a line comes after its table has gone
            eventually(lambda: (tmp_path / "log").read_text().count(removed) == 4)


@pytest.mark.parametrize(("used", "other"), [("nft", "legacy"), ("legacy", "nft")])
def test_the_rules_of_the_other_backend_are_removed(used: str, other: str, tmp_path: Path) -> None:
    """After the first sync, and again when they return; foreign rules stay."""

    def write() -> None:
        command = [f"iptables-{other}-restore", "--noflush"]
        subprocess.run(command, input=OLD_BACKEND, text=True, check=True)

    def rules() -> set[str]:
        return {line for line in saved(f"iptables-{other}-save") if line.startswith("-A")}

    foreign = {FIREWALL, "-A INPUT -j KUBE-FIREWALL", "-A MINE -j ACCEPT"}
    flags = ("--hostname-override=node1", f"--iptables-backend={used}")
    with inside_a_namespace(), server() as api:
        write()
        api.store.create(node("node1", "192.168.99.10"))
        with running(tmp_path / "log", "--master", api.url, *flags):
            eventually(lambda: rules() == foreign)
            assert "rules in place" in (tmp_path / "log").read_text()
            write()
            eventually(lambda: "KUBE-SVC" not in "".join(rules()))
            event = "rules in the other iptables backend removed"
            eventually(lambda: (tmp_path / "log").read_text().count(event) == 2)
