"""An agent that hangs is seen, and ends."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.cluster import node, server, service
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace

pytestmark = pytest.mark.root

PAGES = ("/livez", "/readyz", "/healthz")
# Syncs hang while the file exists, as in a call of the kernel that does not return. The limit is short.
PROGRAM = """
import os, time
from pykubeproxy.agent import family
from pykubeproxy.agent.observe import heartbeat
from pykubeproxy.cli import main
heartbeat.HUNG_AFTER = 2.0
real = family.rule_context
def hang(*arguments):
    while os.path.exists({file!r}):
        time.sleep(0.05)
    return real(*arguments)
family.rule_context = hang
main()
"""


class Hanging:
    """An agent whose syncs hang while `file` exists, and its API server."""

    def __init__(self, api: FaultyApiServer, folder: Path) -> None:
        self.api, self.file, self.log = api, folder / "hang", folder / "log"

    @contextmanager
    def agent(self) -> Iterator[subprocess.Popen[bytes]]:
        program = [sys.executable, "-c", PROGRAM.format(file=str(self.file)), "run"]
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [*program, "--hostname-override=node1", "--master", self.api.url], stderr=log
            )
        try:
            eventually(lambda: answers(HEALTH, "/healthz", 200))
            yield process
        finally:
            process.kill()
            process.wait()

    def hang(self) -> None:
        """Make the agent hang in its next sync."""
        self.file.touch()
        self.api.store.create(service("late", clusterIP="10.96.0.11"))


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("web", clusterIP="10.96.0.10"))
        yield Hanging(api, tmp_path)


def busy_seconds() -> float:
    (line,) = (it for it in fetch(METRICS, "/metrics").body.splitlines() if it.startswith("pykubeproxy_loop"))
    return float(line.split()[-1])


def test_a_hung_loop_is_seen(hanging: Hanging) -> None:
    """All pages fail, a metric shows it, and the log says where; the agent recovers if the call returns."""
    with hanging.agent():
        assert busy_seconds() < 1
        hanging.hang()
        eventually(lambda: answers(HEALTH, "/livez", 503))
        assert all(answers(HEALTH, page, 503) for page in PAGES)
        assert busy_seconds() > 2
        (line,) = (it for it in hanging.log.read_text().splitlines() if "reconcile loop hung" in it)
        assert "at='hang (<string>:" in line
        assert ", sync (family.py:" in line
        hanging.file.unlink()
        eventually(lambda: all(answers(HEALTH, page, 200) for page in PAGES))


def test_an_agent_that_waits_does_not_hang(hanging: Hanging) -> None:
    """Longer than the limit without a change."""
    with hanging.agent() as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(5)
        assert all(answers(HEALTH, page, 200) for page in PAGES)
