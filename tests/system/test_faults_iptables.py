"""The agent reports every failure of iptables and recovers."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace, saved

pytestmark = pytest.mark.root

SYSTEM = "/usr/sbin:/sbin:/usr/local/sbin"
# With short timeouts.
PROGRAM = """
import functools
from pykubeproxy import kernel
from pykubeproxy.cli import main
from pykubeproxy.kernel import tools
tools.LOCK_SECONDS = 1
kernel.open_iptables = functools.partial(kernel.open_iptables, seconds=1.5)
main()
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
        self.tools = folder / "tools"
        self._services = 0
        self.tools.mkdir()
        self.tool = self.tools / f"iptables-{backend}-restore"
        real = shutil.which(self.tool.name, path=SYSTEM)
        self.tool.write_text(
            f'#!/bin/sh\nif [ -e {folder}/fault ]; then . {folder}/fault; fi\nexec {real} "$@"\n'
        )
        self.tool.chmod(0o755)

    @contextmanager
    def agent(self) -> Iterator[subprocess.Popen[bytes]]:
        environment = {
            **os.environ,
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "XTABLES_LOCKFILE": str(self.lock),
        }
        # A separate mount namespace, for the test to change.
        command = ["unshare", "--mount", sys.executable, "-c", PROGRAM, "run", "--hostname-override=node1"]
        command += [
            "--master",
            self.api.url,
            f"--iptables-backend={self.backend}",
            "--iptables-sync-period=500ms",
            "--iptables-min-sync-period=10ms",
        ]
        with self.log.open("wb") as log:
            process = subprocess.Popen(command, stderr=log, env=environment)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

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


def wait_for_rule(faulty: Node, rule: str) -> None:
    """Wait for a rule, polling slowly."""
    deadline = time.monotonic() + 10
    while rule not in faulty.saved():
        assert time.monotonic() < deadline, f"no rule {rule}"
        time.sleep(0.1)


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
            eventually(lambda words=words, begin=begin: faulty.logged(words, begin))
            assert rule not in faulty.saved(), script
            assert "-d 10.96.0.10/32" in faulty.saved(), script
            fault.unlink()
            wait_for_rule(faulty, rule)
        assert process.poll() is None
        assert not faulty.logged("quarantined")
        eventually(lambda: answers(HEALTH, "/healthz", 200))


def test_a_missing_iptables_is_unhealthy(faulty: Node) -> None:
    """After two sync periods; the agent recovers when iptables returns. A restart would not help, so it is alive.

    Here iptables is missing from PATH and from the system's folders.
    """
    faulty.tool.unlink()
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


def test_a_held_lock_names_its_holder(faulty: Node) -> None:
    """nft ignores the lock."""
    with faulty.agent():
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        with faulty.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            rule = faulty.new_service()
            if faulty.backend == "legacy":
                eventually(lambda: faulty.logged(f"is held by process {os.getpid()} ("))
                assert rule not in faulty.saved()
            else:
                wait_for_rule(faulty, rule)
        wait_for_rule(faulty, rule)
