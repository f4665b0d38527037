"""The agent answers and stops during long syncs, and its memory does not grow."""

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.cluster import service
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace, megabytes, running, saved, tool
from tests.fakes.waiting import PATIENCE, eventually

pytestmark = pytest.mark.root


@contextmanager
def agent(api: ApiServer, tmp_path: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    flags = ("--hostname-override=node1", "--iptables-backend=nft", "--master", api.url)
    with running(tmp_path / "agent.log", *flags, environment=environment) as process:
        yield process


@pytest.fixture
def slow(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose iptables-restore for IPv4 waits while the file `hold` exists."""
    wait = f"while [ -e {tmp_path}/hold ]; do touch {tmp_path}/held; sleep 0.05; done"
    return tool(tmp_path, "iptables-nft-restore", f'{wait}\nexec $real "$@"')


def hold(api: ApiServer, tmp_path: Path) -> None:
    """Change a Service and hold its sync."""
    (tmp_path / "hold").touch()
    api.store.create(service("late", clusterIP="10.96.0.20"))
    eventually((tmp_path / "held").exists)


def has(words: str) -> bool:
    return any(words in rule for rule in saved())


def test_pages_are_served_during_a_sync(api: ApiServer, tmp_path: Path, slow: dict[str, str]) -> None:
    """Many concurrent requests are answered."""
    with agent(api, tmp_path, slow):
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        hold(api, tmp_path)
        statuses: list[int] = []

        def poll(port: int, path: str) -> None:
            statuses.extend(fetch(port, path).status for _ in range(10))

        pages = [(HEALTH, "/healthz"), (HEALTH, "/livez"), (METRICS, "/metrics"), (METRICS, "/configz")] * 4
        threads = [threading.Thread(target=poll, args=page) for page in pages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert statuses == [200] * 160
        assert not has("-d 10.96.0.20/32")
        assert "kubeproxy_sync_proxy_rules_service_changes_pending 1.0" in fetch(METRICS, "/metrics").body
        (tmp_path / "hold").unlink()
        eventually(lambda: has("-d 10.96.0.20/32"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_a_sync_completes_it(
    api: ApiServer, tmp_path: Path, slow: dict[str, str], number: signal.Signals
) -> None:
    """Then the process ends with status 0."""
    with agent(api, tmp_path, slow) as process:
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        hold(api, tmp_path)
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        (tmp_path / "hold").unlink()
        assert process.wait(10) == 0
    assert has("-d 10.96.0.20/32")
    assert has("-d 10.96.0.10/32")


def test_an_api_server_that_starts_late_and_restarts(api: ApiServer, tmp_path: Path) -> None:
    """Rules wait for the first lists, stay while the server is away, and follow later changes."""
    api.stop()
    with agent(api, tmp_path, {}) as process:
        eventually(lambda: answers(HEALTH, "/livez", 200))
        eventually(lambda: "Connection refused" in (tmp_path / "agent.log").read_text())
        assert answers(HEALTH, "/readyz", 503)
        assert not has("KUBE-SERVICES")
        api.start()
        eventually(lambda: has("-d 10.96.0.10/32"))
        api.stop()
        api.store.create(service("late", clusterIP="10.96.0.20"))
        before = saved()
        api.start()
        eventually(lambda: has("-d 10.96.0.20/32"))
        assert [rule for rule in saved() if "late" not in rule] == before
        assert process.poll() is None


def test_addresses_in_use_are_bound_later(api: ApiServer, tmp_path: Path) -> None:
    """Rules are written meanwhile; one log line per address."""
    others = [socket.create_server(("", HEALTH)), socket.create_server(("127.0.0.1", METRICS))]
    with agent(api, tmp_path, {}):
        eventually(lambda: has("-d 10.96.0.10/32"))
        log = (tmp_path / "agent.log").read_text()
        assert log.count("Address already in use") == 2
        assert f"0.0.0.0:{HEALTH}" in log
        assert f"127.0.0.1:{METRICS}" in log
        for other in others:
            other.close()
        eventually(lambda: answers(HEALTH, "/healthz", 200))
        eventually(lambda: answers(METRICS, "/healthz", 200))


# Short pauses between failed requests.
IMPATIENT = """
import functools
from pykubeproxy.sources import api
api.Timing = functools.partial(api.Timing, first_pause=0.001, longest_pause=0.005)
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


def test_an_agent_that_never_reaches_the_api_server_does_not_grow(tmp_path: Path) -> None:
    """Without garbage collection, 2000 failed requests take more than 20 MB."""
    flags = ("--hostname-override=node1", "--conntrack-max-per-core=0", "--kube-api-qps=100000")
    with inside_a_namespace():
        api = ClosingServer()
        log = tmp_path / "agent.log"
        with running(log, *flags, "--kube-api-burst=100000", "--master", api.url, before=IMPATIENT) as agent:
            eventually(lambda: api.connections >= 1000)
            before = megabytes(agent.pid)
            eventually(lambda: api.connections >= 3000)
            assert megabytes(agent.pid) - before < 5
