"""One writer for each network namespace."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyroute2 import netns
from structlog.testing import capture_logs

from pykubeproxy.kernel import AlreadyRunning, InstanceLock

pytestmark = pytest.mark.root

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


def test_the_second_is_told_of_the_first(inside: str) -> None:
    """Its number and command line are in the message, however often one asks."""
    with holding() as first:
        for _ in range(300):  # more than a queue of connections nobody takes could hold
            with pytest.raises(AlreadyRunning, match=rf"process {first.pid} \(.*python.* -c from") as caught:
                InstanceLock()
            assert caught.value.holder == first.pid


def test_it_survives_a_want_of_file_descriptors(inside: str) -> None:
    """While it can take no connection it can still be told who has it, and afterwards as often as before."""
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


def test_from_another_container_it_has_no_number(inside: str) -> None:
    """Two pods on the node's network have process ids of their own."""
    with holding():
        container = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", HOLD]
        second = subprocess.run(container, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert second.returncode == 1
    assert "another pykubeproxy, in another container, keeps the rules" in second.stderr


def test_it_is_free_when_its_holder_ends(inside: str) -> None:
    """At once, also after SIGKILL; and after `close`."""
    with holding() as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        with InstanceLock(), pytest.raises(AlreadyRunning):
            InstanceLock()
        InstanceLock().close()
        InstanceLock().close()


def test_another_namespace_is_another_matter(inside: str) -> None:
    """The tables are others, and so is the lock."""
    with InstanceLock():
        name = f"{inside}-b"
        netns.create(name)
        try:
            netns.pushns(name)
            InstanceLock().close()
        finally:
            netns.popns()
            netns.remove(name)


def test_whoever_may_not_write_the_tables_keeps_nobody_out(inside: str) -> None:
    """An abstract name is for any user to take; root goes on then, and says so."""
    with holding(TAKE, user=65534), capture_logs() as lines:
        InstanceLock().close()
    assert [(line["log_level"], line.get("user")) for line in lines] == [("warning", 65534)]


def test_one_that_is_about_to_listen_is_waited_for(inside: str) -> None:
    """Two that start in the same moment: one of them leaves."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("\0pykubeproxy")
        with capture_logs() as lines:
            InstanceLock().close()
        assert len(lines) == 1
        other.listen()
        with pytest.raises(AlreadyRunning) as caught:
            InstanceLock()
        assert caught.value.holder == os.getpid()
