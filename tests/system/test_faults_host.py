"""Faults of the host: a full disk, a closed log pipe, a jumping wall clock."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

import pykubeproxy
from tests.fakes.cluster import service, slice_of
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.process import HEALTH, METRICS, answers, metric, running, saved
from tests.fakes.waiting import eventually

# Every read of the wall clock jumps by ten years.
JUMPING = """
import itertools, time
real, real_ns, jumps = time.time, time.time_ns, itertools.cycle((0, 315_000_000, -315_000_000))
time.time = lambda: real() + next(jumps)
time.time_ns = lambda: real_ns() + next(jumps) * 10**9
"""
# A log queue of two lines.
SHORT_QUEUE = "from pykubeproxy.cli import logs; logs.LogQueue.__init__.__defaults__ = (2,)"
# Modules that read the wall clock, and why: to show or send a time, never to wait for one.
READERS = {
    "agent/observe/status.py": "the times on the status page",
    "agent/observe/events.py": "the times of an Event",
    "agent/observe/health.py": "lastUpdated on /healthz",
    "agent/observe/history.py": "the times on the status page",
    "agent/observe/metrics.py": "metrics that are times, and the latency since the API server's own time stamp",
    "agent/observe/handlers.py": "the times on /statusz",
    "agent/observe/listeners.py": "the times on the status page",
    "agent/quarantine.py": "since when a Service is quarantined",
    "sources/plugin.py": "when the credentials of a plugin expire",
    "sources/manifests.py": "files that have just changed are read once more",
}


def assert_follows_changes(api: FaultyApiServer, process: subprocess.Popen[bytes]) -> None:
    """Wait until the agent serves and applies changes one by one."""
    eventually(lambda: answers(HEALTH, "/readyz", 200))
    for number in range(20, 23):
        address = f"10.96.0.{number}"
        api.store.create(service(f"s{number}", clusterIP=address))
        api.store.create(slice_of(f"s{number}", "10.244.0.5"))
        eventually(lambda: any(address in rule for rule in saved()))
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
    # Buffer log lines, as on a node.
    flags = ("--master", api.url, "--hostname-override=node1", "-v=4")
    with running(errors, *flags, environment={"PYTHONUNBUFFERED": ""}) as process:
        os.close(errors)
        assert_follows_changes(api, process)
        assert answers(METRICS, "/statusz", 200)
        process.terminate()
        assert process.wait(10) == 0


@pytest.mark.root
def test_a_stalled_log_reader_does_not_stop_the_agent(api: FaultyApiServer) -> None:
    """Log lines are dropped and counted; when the reader returns, a line says how many. SIGTERM ends the agent."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.write(writing, b"x" * (1 << 20))
    os.set_blocking(writing, True)
    flags = ("--master", api.url, "--hostname-override=node1", "-v=4")
    with running(writing, *flags, before=SHORT_QUEUE) as process:
        os.close(writing)
        assert_follows_changes(api, process)
        assert all(answers(HEALTH, page, 200) for page in ("/healthz", "/livez", "/readyz"))
        text = ""
        while "log lines dropped" not in text:
            text += os.read(reading, 1 << 16).decode()
        assert re.search(r"log lines dropped lines=[1-9]", text)
        assert metric("pykubeproxy_log_lines_dropped_total") >= 1
        process.terminate()
        assert process.wait(5) == 0
    os.close(reading)


@pytest.mark.root
def test_a_jumping_wall_clock_delays_nothing(api: FaultyApiServer, tmp_path: Path) -> None:
    """It jumps by ten years in both directions at every read."""
    flags = ("--master", api.url, "--hostname-override=node1", "--iptables-min-sync-period=300ms")
    with running(tmp_path / "log", *flags, before=JUMPING) as process:
        assert_follows_changes(api, process)
        assert all(answers(HEALTH, page, 200) for page in ("/healthz", "/livez", "/readyz"))
        assert answers(METRICS, "/metrics", 200)
        assert answers(METRICS, "/statusz", 200)
        api.faults.drop_connections()
        api.store.create(service("after", clusterIP="10.96.0.30"))
        eventually(lambda: any("10.96.0.30" in rule for rule in saved()))
        assert "Traceback" not in (tmp_path / "log").read_text()


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
