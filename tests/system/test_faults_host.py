"""Faults of the host: a full disk, a closed log pipe, a jumping wall clock."""

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pykubeproxy
from tests.fakes.cluster import service, slice_of
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, PROGRAM, answers, saved

# Every read of the wall clock jumps by ten years.
JUMPING = """
import itertools, time
real, real_ns, jumps = time.time, time.time_ns, itertools.cycle((0, 315_000_000, -315_000_000))
time.time = lambda: real() + next(jumps)
time.time_ns = lambda: real_ns() + next(jumps) * 10**9
from pykubeproxy.cli import main
main()
"""
# The agent with a log queue of two lines.
SHORT_QUEUE = (
    sys.executable,
    "-c",
    "from pykubeproxy.cli import logs, main; logs.LogQueue.__init__.__defaults__ = (2,); main()",
    "run",
    "-v=4",
)
# Modules that read the wall clock, and why: to show or send a time, never to wait for one.
READERS = {
    "agent/observe/status.py": "the times on the status page",
    "agent/observe/events.py": "the times of an Event",
    "agent/observe/health.py": "lastUpdated on /healthz",
    "agent/observe/observers.py": "metrics that are times, and the latency since the API server's own time stamp",
    "agent/observe/handlers.py": "the times on /statusz",
    "agent/observe/listeners.py": "the times on the status page",
    "agent/quarantine.py": "since when a Service is quarantined",
    "sources/plugin.py": "when the credentials of a plugin expire",
    "sources/manifests.py": "files that have just changed are read once more",
}


def assert_follows_changes(api: FaultyApiServer, process: subprocess.Popen[bytes]) -> None:
    """Wait until the agent serves and applies changes one by one."""
    eventually(lambda: answers(HEALTH, "/readyz", 200), 30)
    for number in range(20, 23):
        address = f"10.96.0.{number}"
        api.store.create(service(f"s{number}", clusterIP=address))
        api.store.create(slice_of(f"s{number}", "10.244.0.5"))
        eventually(lambda: any(address in rule for rule in saved()), 20)
    assert process.poll() is None


@pytest.mark.root
@pytest.mark.parametrize("log", ["disk-full", "reader-gone"])
def test_an_unwritable_log_does_not_stop_the_agent(api: FaultyApiServer, log: str) -> None:
    """Only log lines are lost."""
    if log == "disk-full":
        errors = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, errors = os.pipe()
        os.close(reading)
    flags = ["--master", api.url, "--hostname-override=node1", "-v=4"]
    # Buffer log lines, as on a node.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen([*PROGRAM, *flags], stderr=errors, env=environment)
    os.close(errors)
    try:
        assert_follows_changes(api, process)
        assert answers(METRICS, "/statusz", 200)
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.root
def test_a_stalled_log_reader_does_not_stop_the_agent(api: FaultyApiServer) -> None:
    """Log lines are dropped and counted; when the reader returns, a line says how many. SIGTERM ends the agent."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.write(writing, b"x" * (1 << 20))
    os.set_blocking(writing, True)
    flags = ["--master", api.url, "--hostname-override=node1"]
    process = subprocess.Popen([*SHORT_QUEUE, *flags], stderr=writing)
    os.close(writing)
    try:
        assert_follows_changes(api, process)
        assert all(answers(HEALTH, page, 200) for page in ("/healthz", "/livez", "/readyz"))
        text = ""
        while "log lines dropped" not in text:
            text += os.read(reading, 1 << 16).decode()
        assert re.search(r"log lines dropped lines=[1-9]", text)
        metric = r"^pykubeproxy_log_lines_dropped_total [1-9]"
        assert re.search(metric, fetch(METRICS, "/metrics").body, re.MULTILINE)
        process.terminate()
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reading)


@pytest.mark.root
def test_a_jumping_wall_clock_delays_nothing(api: FaultyApiServer, tmp_path: Path) -> None:
    """It jumps by ten years in both directions at every read."""
    command = [sys.executable, "-c", JUMPING, "run", "--master", api.url, "--hostname-override=node1"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--iptables-min-sync-period=300ms"], stderr=log)
    try:
        begun = time.monotonic()
        assert_follows_changes(api, process)
        assert all(answers(HEALTH, page, 200) for page in ("/healthz", "/livez", "/readyz"))
        assert answers(METRICS, "/metrics", 200)
        assert answers(METRICS, "/statusz", 200)
        api.faults.drop_connections()
        api.store.create(service("after", clusterIP="10.96.0.30"))
        eventually(lambda: any("10.96.0.30" in rule for rule in saved()), 20)
        assert time.monotonic() - begun < 60
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()


def reads_wall_clock(path: Path) -> bool:
    """Return whether a module reads the wall clock."""
    for it in ast.walk(ast.parse(path.read_text())):
        if isinstance(it, ast.Attribute) and it.attr in ("time", "time_ns", "now", "utcnow", "today"):
            module = it.value.id if isinstance(it.value, ast.Name) else ""
            if module in ("time", "datetime", "date"):
                return True
    return False


def test_only_timestamps_use_the_wall_clock() -> None:
    """Waits and durations use the monotonic clock."""
    root = Path(pykubeproxy.__file__).parent
    packages = ("agent", "kernel", "sources", "rules", "services", "objects", "config")
    found = {
        str(path.relative_to(root))
        for package in packages
        for path in (root / package).rglob("*.py")
        if reads_wall_clock(path)
    }
    assert found <= READERS.keys()
