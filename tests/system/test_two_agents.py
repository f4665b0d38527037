"""Two agents on one node: the second waits, commands that write no rules run."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pykubeproxy.kernel.instance_lock import FOLDER
from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.cluster import service
from tests.fakes.process import HEALTH, answers, pykubeproxy, running, saved
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

QUIET = ["run", "--init-only", "--conntrack-max-per-core=0"]
MANIFESTS = str(Path(__file__).parent.parent / "data/manifests")
RENDER = ["render", "-f", MANIFESTS, "--hostname-override=node1"]


@pytest.fixture
def first(api: ApiServer, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A ready agent."""
    with running(tmp_path / "first", "--master", api.url, "--hostname-override=node1") as process:
        eventually(lambda: answers(HEALTH, "/readyz", 200))
        yield process


@contextmanager
def second(api: ApiServer, log: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A second agent, which waits."""
    with running(log, "--master", api.url, "--hostname-override=node1", *flags) as process:
        eventually(lambda: "waiting for another agent" in log.read_text())
        yield process


def served(address: str) -> bool:
    return any(f"-d {address}/32" in rule for rule in saved())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_second_agent_takes_over_when_the_first_ends(
    api: ApiServer, first: subprocess.Popen[bytes], number: signal.Signals, tmp_path: Path
) -> None:
    """It writes no rules before; then it follows changes, on the same ports."""
    log = tmp_path / "second"
    with second(api, log) as process:
        assert f"holder='process {first.pid} (" in log.read_text()
        api.store.create(service("late", clusterIP="10.96.0.20"))
        eventually(lambda: served("10.96.0.20"))
        assert "rules in place" not in log.read_text()
        # The second one imports the agent before it waits for the lock.
        eventually(lambda: f"process {process.pid} (" in " ".join(pykubeproxy("status").stdout.split()))
        first.send_signal(number)
        first.wait()
        eventually(lambda: "taking over from another agent" in log.read_text())
        eventually(lambda: answers(HEALTH, "/readyz", 200))
        api.store.create(service("later", clusterIP="10.96.0.21"))
        eventually(lambda: served("10.96.0.21"))
        assert "Waiting to take over" not in pykubeproxy("status").stdout
        assert process.poll() is None


def test_a_waiting_agent_is_alive_but_not_ready(
    api: ApiServer, first: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """On its own ports, if they differ from those of the first; `status` says for whom it waits."""
    ports = ("--healthz-bind-address=0.0.0.0:10266", "--metrics-bind-address=127.0.0.1:10259")
    with second(api, tmp_path / "second", *ports):
        eventually(lambda: answers(10266, "/livez", 200))
        assert answers(10266, "/readyz", 503)
        assert answers(10266, "/healthz", 503)
        status = pykubeproxy("status", "--url", "http://127.0.0.1:10259")
        assert status.returncode == 1
        words = " ".join(status.stdout.split())
        assert f"Waiting: another pykubeproxy, process {first.pid} (" in words
        assert "this one takes over when it ends" in words
        first.kill()
        eventually(lambda: answers(10266, "/healthz", 200))
        assert pykubeproxy("status", "--url", "http://127.0.0.1:10259").returncode == 0


def test_one_agent_goes_on_when_the_file_of_the_lock_is_deleted(
    api: ApiServer, first: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """It makes a new one, and a second agent waits. If that was faster, the first one ends."""
    lock = FOLDER / f"net-{Path(f'/proc/{first.pid}/ns/net').stat().st_ino}.lock"
    lock.unlink()
    eventually(lambda: "instance lock restored" in (tmp_path / "first").read_text())
    with second(api, tmp_path / "second"):
        assert f"holder='process {first.pid} (" in (tmp_path / "second").read_text()
    new = lock.with_suffix(".new")
    with new.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        new.replace(lock)
        assert first.wait(10) == 1
    assert f"another pykubeproxy, process {os.getpid()} (" in (tmp_path / "first").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_waiting_agent_ends_at_once(
    api: ApiServer, first: subprocess.Popen[bytes], number: signal.Signals, tmp_path: Path
) -> None:
    """With status 0, and without bindAddressHardFail's check of addresses that the first one has."""
    log = tmp_path / "second"
    with second(api, log, "--bind-address-hard-fail") as process:
        process.send_signal(number)
        assert process.wait(10) == 0
    assert "stopping while waiting" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert first.poll() is None


def test_commands_beside_an_agent(api: ApiServer, first: subprocess.Popen[bytes]) -> None:
    """Those that write rules fail and name the agent's process; the others run. The agent is not affected."""
    before = saved()
    other = f"another pykubeproxy, process {first.pid} ("
    once = pykubeproxy("run", "--master", api.url, "--hostname-override=node1", "--once")
    assert once.returncode == 3
    (line,) = once.stderr.splitlines()
    assert other in line
    assert "stop it first" in line
    for arguments in (["cleanup"], ["run", "--cleanup"]):
        rejected = pykubeproxy(*arguments)
        assert rejected.returncode == 1
        assert rejected.stderr.startswith(f"Error: {other}")
    assert "would be removed" in pykubeproxy("cleanup", "--dry-run").stdout
    for allowed in (QUIET, RENDER):
        done = pykubeproxy(*allowed)
        assert done.returncode == 0, done.stderr
    assert (saved(), first.poll()) == (before, None)
    api.store.create(service("late", clusterIP="10.96.0.20"))
    eventually(lambda: served("10.96.0.20"))
    first.kill()
    first.wait()
    assert pykubeproxy("cleanup").returncode == 0
    assert not any("KUBE-SVC" in rule for rule in saved())
