"""An agent that hangs is seen, and ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.cluster import service
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.process import HEALTH, answers, inside_a_namespace, is_running, metric, running, tool
from tests.fakes.waiting import PATIENCE, eventually

pytestmark = pytest.mark.root

PAGES = ("/livez", "/readyz", "/healthz")
# Syncs hang while the file exists, as in a call of the kernel that does not return. The limits are short.
PROGRAM = """
import os, time
from pykubeproxy.agent import family, stops
from pykubeproxy.agent.observe import health
health.HUNG_AFTER, stops.STOP_SECONDS = 2.0, 1.5
real = family.rule_context
def hang(*arguments):
    while os.path.exists({file!r}):
        time.sleep(0.05)
    return real(*arguments)
family.rule_context = hang
"""
# Hangs with a child while the file exists.
TOOL = 'if [ -e {file} ]; then sleep 600 & echo $$ $! >> {file}; wait; fi\nexec $real "$@"'


class Hanging:
    """An agent and its API server; syncs hang while `file` exists, iptables-restore while `tool_file` exists."""

    def __init__(self, api: FaultyApiServer, folder: Path) -> None:
        self.api, self.file, self.log = api, folder / "hang", folder / "log"
        self.tool_file = folder / "hang-tool"
        self._environment = tool(folder, "iptables-nft-restore", TOOL.format(file=self.tool_file))

    @contextmanager
    def agent(self) -> Iterator[subprocess.Popen[bytes]]:
        flags = ("--hostname-override=node1", "--iptables-backend=nft", "--master", self.api.url)
        before = PROGRAM.format(file=str(self.file))
        with running(self.log, *flags, environment=self._environment, before=before) as process:
            eventually(lambda: answers(HEALTH, "/healthz", 200))
            yield process

    def hang(self, file: Path) -> None:
        """Make the agent hang in its next sync."""
        file.touch()
        self.api.store.create(service("late", clusterIP="10.96.0.11"))


@pytest.fixture
def hanging(api: FaultyApiServer, tmp_path: Path) -> Hanging:
    return Hanging(api, tmp_path)


def busy_seconds() -> float:
    return metric("pykubeproxy_loop")


def test_a_hung_loop_is_seen(hanging: Hanging) -> None:
    """All pages fail, a metric shows it, and the log says where; the agent recovers if the call returns.

    A loop that waits longer than the limit without a change does not hang.
    """
    with hanging.agent():
        time.sleep(2.5)
        assert all(answers(HEALTH, page, 200) for page in PAGES)
        eventually(lambda: busy_seconds() < 1)
        hanging.hang(hanging.file)
        eventually(lambda: answers(HEALTH, "/livez", 503))
        assert all(answers(HEALTH, page, 503) for page in PAGES)
        assert busy_seconds() > 2
        (line,) = (it for it in hanging.log.read_text().splitlines() if "reconcile loop hung" in it)
        assert "at='hang (<string>:" in line
        assert ", sync (family.py:" in line
        hanging.file.unlink()
        eventually(lambda: all(answers(HEALTH, page, 200) for page in PAGES))


def seconds_to_end(process: subprocess.Popen[bytes], *signals: signal.Signals) -> float:
    """Send signals and return after how many seconds the process has ended."""
    begun = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.2)
    process.wait(PATIENCE)
    return time.monotonic() - begun


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_hung_agent(hanging: Hanging, number: signal.Signals) -> None:
    """By force after a time limit, with 128 and the number of the signal as status."""
    with hanging.agent() as process:
        hanging.hang(hanging.file)
        eventually(lambda: busy_seconds() > 0.5)
        assert seconds_to_end(process, number) > 1.4
        assert process.returncode == 128 + number
        assert "stopping by force, rules stay in place" in hanging.log.read_text()


def test_a_second_signal_ends_a_hung_agent_at_once(hanging: Hanging) -> None:
    with hanging.agent() as process:
        hanging.hang(hanging.file)
        eventually(lambda: busy_seconds() > 0.5)
        seconds_to_end(process, signal.SIGTERM, signal.SIGTERM)
        assert process.returncode == 128 + signal.SIGTERM
        assert "reason='second signal'" in hanging.log.read_text()


def test_a_signal_ends_a_hung_iptables_too(hanging: Hanging) -> None:
    """With what it has started."""
    with hanging.agent() as process:
        hanging.hang(hanging.tool_file)
        eventually(lambda: hanging.tool_file.read_text())
        seconds_to_end(process, signal.SIGTERM)
        assert process.returncode == 128 + signal.SIGTERM
        pids = hanging.tool_file.read_text().split()
        assert len(pids) == 2
        eventually(lambda: not any(is_running(int(pid)) for pid in pids))


@pytest.mark.parametrize("once", [True, False])
def test_a_signal_ends_an_agent_that_waits_for_its_first_lists(tmp_path: Path, once: bool) -> None:
    """The API server accepts connections and does not answer."""
    with inside_a_namespace(), socket.create_server(("127.0.0.1", 0)) as silent:
        flags = ["--hostname-override=node1", f"--master=http://127.0.0.1:{silent.getsockname()[1]}"]
        with running(tmp_path / "log", *flags, *(["--once"] if once else [])) as process:
            connection, _ = silent.accept()
            seconds_to_end(process, signal.SIGTERM)
            assert process.returncode == (128 + signal.SIGTERM if once else 0)
            connection.close()


def test_a_signal_ends_process_1_while_it_imports(tmp_path: Path) -> None:
    """As in a container. The kernel drops signals for which process 1 has no handler."""
    importing = tmp_path / "importing"
    script = (
        "import importlib, pathlib, time\n"
        "from pykubeproxy.cli import main\n"
        f"importlib.import_module = lambda _: (pathlib.Path({str(importing)!r}).touch(), time.sleep(60))\n"
        "main()\n"
    )
    program = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", script, "run"]
    process = subprocess.Popen(program)
    try:
        eventually(importing.exists)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
