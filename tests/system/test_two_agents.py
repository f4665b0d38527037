"""Two agents on one node: the second exits, commands that write no rules run."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.cluster import service
from tests.fakes.follower import eventually
from tests.fakes.process import HEALTH, answers, running, saved

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


def pykubeproxy(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = (sys.executable, "-c", "from pykubeproxy.cli import main; main()")
    return subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("once", [False, True], ids=["agent", "once"])
def test_a_second_agent_exits(
    api: ApiServer, first: subprocess.Popen[bytes], once: bool, tmp_path: Path
) -> None:
    """With status 3 and the pid of the first, which is not affected."""
    before = saved()
    flags = ["--master", api.url, "--hostname-override=node1", *(["--once"] if once else [])]
    second = pykubeproxy("run", *flags)
    assert second.returncode == 3
    (line,) = second.stderr.splitlines()
    assert f"another pykubeproxy, process {first.pid} (" in line
    assert "stop it first" in line
    assert (saved(), first.poll()) == (before, None)
    api.store.create(service("late", clusterIP="10.96.0.20"))
    eventually(lambda: any("10.96.0.20" in rule for rule in saved()))


def test_cleanup_requires_a_stopped_agent(first: subprocess.Popen[bytes]) -> None:
    """The error names the process; a dry run is allowed."""
    before = saved()
    for arguments in (["cleanup"], ["run", "--cleanup"]):
        rejected = pykubeproxy(*arguments)
        assert rejected.returncode == 1
        assert rejected.stderr.startswith(f"Error: another pykubeproxy, process {first.pid} (")
    assert "would be removed" in pykubeproxy("cleanup", "--dry-run").stdout
    assert saved() == before
    first.kill()
    first.wait()
    assert pykubeproxy("cleanup").returncode == 0
    assert not any("KUBE-SVC" in rule for rule in saved())


@pytest.mark.parametrize("arguments", [QUIET, RENDER], ids=["init-only", "render"])
def test_commands_that_write_no_rules_run_beside_an_agent(
    first: subprocess.Popen[bytes], arguments: list[str]
) -> None:
    done = pykubeproxy(*arguments)
    assert done.returncode == 0, done.stderr
