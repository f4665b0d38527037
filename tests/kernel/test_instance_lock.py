"""Lock the tables of a network namespace against a second agent."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyroute2 import netns
from structlog.testing import capture_logs

from pykubeproxy.kernel import AlreadyRunning, InstanceLock
from tests.fakes.follower import eventually

pytestmark = pytest.mark.root

FILES = Path("/proc/self/fd")

HOLD = "from pykubeproxy.kernel import InstanceLock; InstanceLock(); print('held', flush=True); input()"
SHORT = """
import resource
from pykubeproxy.kernel import InstanceLock
InstanceLock()
least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
print("held", flush=True)
input()
resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))
print("again", flush=True)
input()
"""
TAKE = r"import socket; s = socket.socket(socket.AF_UNIX); s.bind('\0pykubeproxy'); s.listen(); print('held', flush=True); input()"


@contextmanager
def holding(program: str = HOLD, user: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the lock."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable if user == 0 else "/usr/bin/python3", "-c", program]
    process = subprocess.Popen(command, user=user, **pipes)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_error_names_the_holder(inside: str) -> None:
    """Every attempt names pid and command line."""
    with holding() as first:
        for _ in range(300):  # more than a queue of connections nobody takes could hold
            with pytest.raises(AlreadyRunning, match=rf"process {first.pid} \(.*python.* -c from"):
                InstanceLock()


def test_error_shows_no_password(inside: str) -> None:
    """Of the URL of --master."""
    program = f"master = 'https://admin:secret@10.0.0.1:6443'; {HOLD}"
    with holding(program), pytest.raises(AlreadyRunning, match=r"'https://10.0.0.1:6443'"):
        InstanceLock()


def test_holder_without_file_descriptors(inside: str) -> None:
    """Attempts still fail, and more of them once descriptors are available again."""
    with holding(SHORT) as first:
        for _ in range(5):
            with pytest.raises(AlreadyRunning):
                InstanceLock()
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write(b"\n")
        first.stdin.flush()
        assert first.stdout.readline() == b"again\n"
        for _ in range(300):
            with pytest.raises(AlreadyRunning):
                InstanceLock()


def test_a_full_queue_of_the_holder_does_not_hide_it(inside: str) -> None:
    """Any user can fill it while the holder gets no CPU."""
    with holding() as first, contextlib.ExitStack() as stack:
        first.send_signal(signal.SIGSTOP)
        os.waitpid(first.pid, os.WUNTRACED)
        with contextlib.suppress(BlockingIOError):
            for _ in range(1000):
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect("\0pykubeproxy")
        threading.Timer(0.5, first.send_signal, [signal.SIGCONT]).start()
        with pytest.raises(AlreadyRunning):
            InstanceLock()


def test_holder_in_another_container_has_no_pid(inside: str) -> None:
    """Two pods on the host network have separate pid namespaces."""
    with holding():
        container = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", HOLD]
        second = subprocess.run(container, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert second.returncode == 1
    assert "another pykubeproxy, in another container, manages the rules" in second.stderr


def test_lock_is_free_when_the_holder_ends(inside: str) -> None:
    """At once after SIGKILL, and after `close`."""
    with holding() as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        with InstanceLock(), pytest.raises(AlreadyRunning):
            InstanceLock()
        InstanceLock().close()
        InstanceLock().close()


def test_each_network_namespace_has_its_own_lock(inside: str) -> None:
    """The lock of one namespace does not block another."""
    with InstanceLock():
        name = f"{inside}-b"
        netns.create(name)
        try:
            netns.pushns(name)
            InstanceLock().close()
        finally:
            netns.popns()
            netns.remove(name)


def test_unprivileged_holder_causes_a_warning_only(inside: str) -> None:
    """Any user can bind an abstract name; root goes on and logs a warning."""
    with holding(TAKE, user=65534), capture_logs() as lines:
        InstanceLock().close()
    assert [(line["log_level"], line.get("user")) for line in lines] == [("warning", 65534)]


def test_waits_for_a_holder_that_does_not_listen_yet(inside: str) -> None:
    """Of two agents that start at the same time, one fails."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("\0pykubeproxy")
        with capture_logs() as lines:
            InstanceLock().close()
        assert len(lines) == 1
        other.listen()
        with pytest.raises(AlreadyRunning, match=rf"process {os.getpid()} \("):
            InstanceLock()


WAIT = """
from pykubeproxy.kernel import InstanceLock
lock = InstanceLock.when_free(lambda holder: print(holder, flush=True))
print("held", flush=True)
input()
"""
# Connects again and again, keeps the connections, and never reads.
FLOOD = r"""
import socket
print("held", flush=True)
kept = []
while True:
    client = socket.socket(socket.AF_UNIX)
    client.connect('\0pykubeproxy')
    kept = [*kept[-500:], client]
"""


@contextmanager
def waiting() -> Iterator[subprocess.Popen[str]]:
    """A process that waits for the lock."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", WAIT], text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_waiting_process_gets_the_lock_when_the_holder_is_killed(inside: str) -> None:
    """Within a second, and one of several only; the others learn of the new holder."""
    with holding() as first, waiting() as second, waiting() as third:
        for process in (second, third):
            assert line(process).startswith(f"process {first.pid} (")
        time.sleep(0.5)
        first.kill()
        killed = time.monotonic()
        lines = {line(second), line(third)}
        assert time.monotonic() - killed < 1
        assert "held" in lines
        (other,) = lines - {"held"}
        assert other.startswith((f"process {second.pid} (", f"process {third.pid} ("))


def test_a_holder_in_another_container_is_awaited(inside: str) -> None:
    """Processes of two pods see no pid of each other."""
    with holding() as first:
        container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", WAIT]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(container, text=True, **pipes) as other:
            assert line(other) == "in another container"
            time.sleep(0.2)
            first.kill()
            assert line(other) == "held"
            other.communicate("\n")


def test_the_holder_knows_who_waits(inside: str) -> None:
    """Not those that only asked who holds it, nor those that have ended; `close` ends the wait."""
    lock = InstanceLock()
    for _ in range(3):
        with pytest.raises(AlreadyRunning):
            InstanceLock()
    assert lock.waiting() == ()
    with waiting() as other:
        assert line(other).startswith(f"process {os.getpid()} (")
        eventually(lock.waiting)
        (one,) = lock.waiting()
        assert one.startswith(f"process {other.pid} (")
    assert lock.waiting() == ()
    with waiting() as other:
        line(other)
        eventually(lock.waiting)
        lock.close()
        assert line(other) == "held"


def test_connections_of_other_users_take_no_descriptors(inside: str) -> None:
    """They do not end the wait of others either, nor hide the holder."""
    with InstanceLock() as lock, holding(FLOOD, user=65534), waiting() as other:
        line(other)
        before = len([*FILES.iterdir()])
        for _ in range(20):
            with pytest.raises(AlreadyRunning):
                InstanceLock()
            assert len([*FILES.iterdir()]) < before + 12
        eventually(lambda: any(f"process {other.pid} (" in it for it in lock.waiting()))
