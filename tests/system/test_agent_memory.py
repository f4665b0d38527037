"""The memory of an agent that has not finished its first sync."""

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.follower import eventually
from tests.fakes.process import inside_a_namespace

pytestmark = pytest.mark.root

# The agent with short pauses between failed requests.
IMPATIENT = """
import functools
from pykubeproxy.sources import api
api.Timing = functools.partial(api.Timing, first_pause=0.001, longest_pause=0.005)
from pykubeproxy.cli import main
main()
"""


class ClosingServer:
    """A server that closes each connection at once, and counts them."""

    def __init__(self) -> None:
        self.connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._socket.accept()[0].close()
            self.connections += 1


@contextmanager
def impatient_agent(log: Path, url: str) -> Iterator[int]:
    """Run an agent and yield its process ID."""
    rate = ("--kube-api-qps=100000", "--kube-api-burst=100000")
    flags = ("--hostname-override=node1", "--master", url, "--conntrack-max-per-core=0", *rate)
    with log.open("wb") as errors:
        process = subprocess.Popen([sys.executable, "-c", IMPATIENT, "run", *flags], stderr=errors)
        try:
            yield process.pid
        finally:
            process.kill()
            process.wait()


def megabytes(pid: int) -> float:
    """Return the resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


def test_an_agent_that_never_reaches_the_api_server_does_not_grow(tmp_path: Path) -> None:
    """Without garbage collection, 2000 failed requests take more than 20 MB."""
    with inside_a_namespace():
        api = ClosingServer()
        with impatient_agent(tmp_path / "agent.log", api.url) as pid:
            eventually(lambda: api.connections >= 1000, 60)
            before = megabytes(pid)
            eventually(lambda: api.connections >= 3000, 60)
            assert megabytes(pid) - before < 5
