"""Two agents on one node: the second says so and leaves; what writes nothing may run beside the first."""

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
    """An agent that has its rules in place."""
    with running(tmp_path / "first", "--master", api.url, "--hostname-override=node1") as process:
        eventually(lambda: answers(HEALTH, "/readyz", 200))
        yield process


def pykubeproxy(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = (sys.executable, "-c", "from pykubeproxy.cli import main; main()")
    return subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("once", [False, True], ids=["agent", "once"])
def test_the_second_leaves(
    api: ApiServer, first: subprocess.Popen[bytes], once: bool, tmp_path: Path
) -> None:
    """With a line that names the first one's pid, and status 3; nothing was written, and the first goes on."""
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


def test_cleanup_waits_for_the_end_of_the_agent(first: subprocess.Popen[bytes]) -> None:
    """While it runs nothing is taken out, and the error says why; a dry run is welcome."""
    before = saved()
    for arguments in (["cleanup"], ["run", "--cleanup"]):
        refused = pykubeproxy(*arguments)
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"Error: another pykubeproxy, process {first.pid} (")
    assert "would be removed" in pykubeproxy("cleanup", "--dry-run").stdout
    assert saved() == before
    first.kill()
    first.wait()
    assert pykubeproxy("cleanup").returncode == 0
    assert not any("KUBE-SVC" in rule for rule in saved())


@pytest.mark.parametrize("arguments", [QUIET, RENDER], ids=["init-only", "render"])
def test_what_writes_no_rules_runs_beside_it(first: subprocess.Popen[bytes], arguments: list[str]) -> None:
    """An init container of the next agent, or somebody who wants to see rules."""
    done = pykubeproxy(*arguments)
    assert done.returncode == 0, done.stderr
