"""The agent reports each failure of iptables, isolates rules that iptables refuses, and recovers."""

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

import pytest

from pykubeproxy.lab.apiserver import EVENTS, SERVICES, ApiServer
from pykubeproxy.rules.dispatch import TREE_ABOVE
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.http_client import fetch
from tests.fakes.process import (
    HEALTH,
    METRICS,
    answers,
    inside_a_namespace,
    metric,
    pykubeproxy,
    running,
    saved,
    status,
    tool,
)
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

SHORT_TIMEOUTS = """
import functools
from pykubeproxy import kernel
from pykubeproxy.kernel import iptables
iptables.LOCK_SECONDS = 1
kernel.open_iptables = functools.partial(kernel.open_iptables, seconds=1.5)
"""
# Scripts that replace iptables-restore, and the expected log text.
FAULTS = {
    "exit 4": "failed with exit code 4: it gave no reason",
    "kill -KILL $$": "was killed by signal 9",
    "sleep 600 & wait": "made no progress for 1.5 s and was killed",
    "echo 'line 3: RULE_APPEND failed (Cannot allocate memory): rule in chain X' >&2; exit 4": "allocate memory",
}


class Node:
    """A node with an agent, one service, and an iptables-restore for IPv4 with scripted faults."""

    def __init__(self, folder: Path, backend: str, api: ApiServer) -> None:
        self.folder = folder
        self.backend = backend
        self.api = api
        self.log = folder / "agent.log"
        self.lock = folder / "xtables.lock"
        self._services = 0
        script = f'if [ -e {folder}/fault ]; then . {folder}/fault; fi\nexec $real "$@"'
        self._environment = tool(folder, f"iptables-{backend}-restore", script)

    def agent(self) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Run an agent in a mount namespace of its own, for the test to change."""
        flags = ("--hostname-override=node1", "--master", self.api.url, f"--iptables-backend={self.backend}")
        periods = ("--iptables-sync-period=500ms", "--iptables-min-sync-period=10ms")
        environment = {**self._environment, "XTABLES_LOCKFILE": str(self.lock)}
        return running(
            self.log,
            *(*flags, *periods),
            environment=environment,
            before=SHORT_TIMEOUTS,
            inside=("unshare", "--mount"),
        )

    def saved(self) -> str:
        return "\n".join(saved(f"iptables-{self.backend}-save"))

    def new_service(self) -> str:
        """Create a Service; return the beginning of a rule for it."""
        self._services += 1
        name, ip = f"svc{self._services}", f"10.96.1.{self._services}"
        self.api.store.create(service(name, clusterIP=ip))
        self.api.store.create(slice_of(name, f"10.244.1.{self._services}"))
        return f"-d {ip}/32"

    def logged(self, words: str, since: int = 0) -> bool:
        return words in self.log.read_text()[since:]


@pytest.fixture(params=["nft", "legacy"])
def faulty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("web", clusterIP="10.96.0.10"))
        api.store.create(slice_of("web", "10.244.0.5"))
        yield Node(tmp_path, request.param, api)


def test_each_fault_is_logged_and_retried(faulty: Node) -> None:
    """Services stay served, none is quarantined, and changes follow within one retry."""
    fault = faulty.folder / "fault"
    with faulty.agent() as process:
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        for script, words in FAULTS.items():
            begin = len(faulty.log.read_text())
            fault.write_text(script)
            rule = faulty.new_service()
            eventually(lambda: faulty.logged(words, begin))
            assert rule not in faulty.saved(), script
            assert "-d 10.96.0.10/32" in faulty.saved(), script
            fault.unlink()
            eventually(lambda: rule in faulty.saved())
        # nft ignores the lock.
        with faulty.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            rule = faulty.new_service()
            if faulty.backend == "legacy":
                eventually(lambda: faulty.logged(f"is held by process {os.getpid()} ("))
                assert rule not in faulty.saved()
            else:
                eventually(lambda: rule in faulty.saved())
        eventually(lambda: rule in faulty.saved())
        assert process.poll() is None
        assert not faulty.logged("quarantined")
        eventually(lambda: answers(HEALTH, "/healthz", 200))


def test_a_missing_iptables_is_unhealthy(faulty: Node) -> None:
    """After two sync periods; the agent recovers when iptables returns. A restart would not help, so it is alive.

    Here iptables is missing from PATH and from the system's folders.
    """
    (faulty.folder / "tools" / f"iptables-{faulty.backend}-restore").unlink()
    (empty := faulty.folder / "empty").mkdir()
    with faulty.agent() as process:
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        # Enter its root, too: the tests may run in a chroot.
        inside = ("nsenter", f"--mount=/proc/{process.pid}/ns/mnt", f"--root=/proc/{process.pid}/root")
        subprocess.run([*inside, "mount", "--bind", str(empty), "/usr/sbin"], check=True)
        rule = faulty.new_service()
        eventually(lambda: faulty.logged("not found on PATH"))
        eventually(lambda: answers(HEALTH, "/healthz", 503))
        assert answers(HEALTH, "/readyz", 503)
        time.sleep(1.5)
        assert answers(HEALTH, "/livez", 200)
        counted = 'kubeproxy_sync_proxy_rules_iptables_restore_failures_total{ip_family="IPv4"}'
        assert counted in fetch(METRICS, "/metrics").body
        assert rule not in faulty.saved()
        subprocess.run([*inside, "umount", "/usr/sbin"], check=True)
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        assert rule in faulty.saved()


QUARANTINED = 'pykubeproxy_services_quarantined{ip_family="IPv4"}'
TREE_REJECTED = 'pykubeproxy_dispatch_tree_rejected{ip_family="IPv4"}'
BAD_SERVICE = "/default.bad cluster IP/s/ -m tcp / -m tcp -m nfacct --nfacct-name nobody /"


def rejecting_environment(folder: Path, backend: str) -> dict[str, str]:
    """Return an environment in which some rules use a counter that does not exist, until a file `well` is there."""
    script = f'[ -e {folder}/well ] && exec $real "$@"\nsed \'{BAD_SERVICE}\' | $real "$@"'
    lock = {"XTABLES_LOCKFILE": str(folder / "lock")}
    return tool(folder, f"iptables-{backend}-restore", script) | lock


def command(*words: str) -> str:
    return " ".join(pykubeproxy(*words).stdout.split())


def events(api: ApiServer) -> list[tuple[str, str, str]]:
    found = (event | event["regarding"] for event in api.store.list(EVENTS))
    return [(event["name"], event.get("uid", ""), event["reason"]) for event in found]


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_a_rejected_service_is_quarantined_and_released(backend: str, tmp_path: Path) -> None:
    """All others are served; log, metric, event, status, page and dump-rules name it."""
    flags = ("--hostname-override=node1", f"--iptables-backend={backend}")
    log = tmp_path / "agent.log"
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        made = api.store.create(service("bad", clusterIP="10.96.0.10"))
        api.store.create(slice_of("bad", "10.244.0.5"))
        api.store.create(service("good", clusterIP="10.96.0.11"))
        api.store.create(slice_of("good", "10.244.0.6"))
        environment = rejecting_environment(tmp_path, backend)
        with running(log, *flags, "--master", api.url, environment=environment):
            eventually(lambda: answers(METRICS, "/healthz", 200))
            eventually(lambda: metric(QUARANTINED) == 1)
            rules = "\n".join(saved(f"iptables-{backend}-save"))
            assert "-A KUBE-SERVICES -d 10.96.0.11/32 -p tcp" in rules
            assert '-d 10.96.0.10/32 -p tcp -m comment --comment "default/bad is quarantined"' in rules
            eventually(lambda: ("bad", made["metadata"]["uid"], "ServiceQuarantined") in events(api))
            (quarantined,) = status().families[0].quarantined
            assert (str(quarantined.port_name), quarantined.rejects_clients) == ("default/bad", True)
            page = fetch(METRICS, "/statusz", accept="text/html").body
            assert "default/bad" in page.partition("Quarantined")[2]
            assert "Quarantined: 1. They are not served." in command("status")
            dumped = command("dump-rules", "bad", "--iptables-backend", backend)
            assert (
                "cluster IP 10.96.0.10:80 rejected: quarantined (`pykubeproxy status` has the reason)"
                in dumped
            )
            assert log.read_text().count("service quarantined") == 1

            (tmp_path / "well").touch()
            api.store.replace(made | {"spec": made["spec"] | {"ports": [{"port": 81, "protocol": "TCP"}]}})
            eventually(lambda: metric(QUARANTINED) == 0)
            assert "-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp" in "\n".join(saved(f"iptables-{backend}-save"))
            assert "service released from quarantine" in log.read_text()
            assert "quarantined" not in fetch(METRICS, "/statusz", accept="text/html").body.lower()


def jumps_from_deep_below(levels: int) -> str:
    """Return restore input of another program that jumps to KUBE-SERVICES below so many chains."""
    chains = [f"DEEP-{number}" for number in range(levels)]
    path = ["PREROUTING", *chains, "KUBE-SERVICES"]
    declared = "".join(f":{chain} - [0:0]\n" for chain in (*chains, "KUBE-SERVICES"))
    jumps = "".join(f"-A {chain} -j {below}\n" for chain, below in pairwise(path))
    return f"*nat\n{declared}{jumps}COMMIT\n"


def test_a_rejected_dispatch_tree_is_replaced_by_a_flat_chain(tmp_path: Path) -> None:
    """All Services are served; log, metric, status and page say so. A restart tries the tree again."""
    flags = ("--hostname-override=node1", "--iptables-backend=nft")
    log = tmp_path / "agent.log"
    sentence = (
        "IPv4 uses a flat chain. iptables rejects the dispatch tree, which is tried again once an hour:"
    )

    def rules() -> list[str]:
        return [line for line in saved("iptables-nft-save") if line.startswith("-A KUBE-SERVICES -d")]

    with inside_a_namespace(), server() as api:
        subprocess.run(
            ["iptables-nft-restore"], input=jumps_from_deep_below(11), text=True, check=True, timeout=10
        )
        api.store.create(node("node1", "192.168.99.10"))
        for number in range(1, TREE_ABOVE + 20):
            api.store.create(service(f"s{number}", clusterIP=f"10.96.0.{number}"))
            api.store.create(slice_of(f"s{number}", f"10.244.0.{number}"))
        with running(log, *flags, "--master", api.url):
            eventually(lambda: answers(METRICS, "/healthz", 200))
            eventually(lambda: metric(TREE_REJECTED) == 1)
            assert sum("cluster IP" in rule for rule in rules()) == TREE_ABOVE + 19
            assert sentence in command("status")
            assert sentence in " ".join(fetch(METRICS, "/statusz", accept="text/html").body.split())
            api.store.delete(SERVICES, "default", "s7")
            eventually(lambda: sum("cluster IP" in rule for rule in rules()) == TREE_ABOVE + 18)
            assert log.read_text().count("dispatch tree rejected, using a flat chain") == 1
            assert "service quarantined" not in log.read_text()
        subprocess.run(["iptables-nft", "-t", "nat", "-F", "DEEP-0"], check=True, timeout=10)
        with running(log, *flags, "--master", api.url):
            eventually(lambda: answers(METRICS, "/healthz", 200))
            eventually(lambda: len(rules()) < 20)
            eventually(lambda: metric(TREE_REJECTED) == 0)
            assert sentence not in command("status")
