"""Lock the tables of a network namespace against a second agent."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyroute2 import netns

from pykubeproxy.kernel import AlreadyRunning, InstanceLock, KernelError, instance_lock
from pykubeproxy.kernel.system import lockers
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

HOLD = (
    "from pykubeproxy.kernel import InstanceLock; lock = InstanceLock(); print('held', flush=True); input()"
)
WAIT = """
from pykubeproxy.kernel import InstanceLock, lock_holder
lock = InstanceLock(lambda: print(lock_holder(), flush=True))
print("held", flush=True)
input()
"""
IN_A_CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
# Root without capabilities that does not see the node's files, as in a container on the host network. It takes each name
# and file that an agent may use.
INTRUDER = r"""
import fcntl, os, socket
names = [socket.socket(socket.AF_UNIX)]
names[0].bind("\0pykubeproxy")
names[0].listen()
os.makedirs("/run/pykubeproxy")
lock = open(f"/run/pykubeproxy/net-{os.stat('/proc/self/ns/net').st_ino}.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
network = open("/proc/self/ns/net")
fcntl.flock(network, fcntl.LOCK_EX)
print("held", flush=True)
input()
"""
OTHER_ROOT = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
    'mount -t tmpfs tmpfs /run; exec setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all "$@"',
    "sh",
)


@contextmanager
def started(program: str, *before: str) -> Iterator[subprocess.Popen[str]]:
    """A process that takes the lock, or waits for it."""
    command = [*before, sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def holding(program: str = HOLD, *before: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock."""
    with started(program, *before) as process:
        assert line(process) == "held"
        yield process


def test_error_names_the_holder(inside: str) -> None:
    """Pid and command line."""
    with (
        holding() as first,
        pytest.raises(AlreadyRunning, match=rf"process {first.pid} \(.*python.* -c from"),
    ):
        InstanceLock()


def test_error_shows_no_password(inside: str) -> None:
    """Of the URL of --master."""
    program = f"master = 'https://admin:secret@10.0.0.1:6443'; {HOLD}"
    with holding(program), pytest.raises(AlreadyRunning, match=r"'https://10.0.0.1:6443'"):
        InstanceLock()


def test_holder_in_another_container_has_no_pid(inside: str) -> None:
    """Two pods on the host network have separate pid namespaces."""
    with holding():
        container = [*IN_A_CONTAINER, sys.executable, "-c", HOLD]
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


def test_commands_of_the_holder_do_not_keep_the_lock(inside: str) -> None:
    """A hung iptables outlives a killed agent."""
    program = "import subprocess; from pykubeproxy.kernel import InstanceLock; lock = InstanceLock()\n"
    program += "child = subprocess.Popen(['sleep', '60']); print('held', flush=True); print(child.pid, flush=True); input()"
    with holding(program) as first:
        child = int(line(first))
        first.kill()
        first.wait()
        try:
            InstanceLock().close()
        finally:
            os.kill(child, signal.SIGKILL)


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


def test_root_of_a_container_cannot_keep_an_agent_waiting(inside: str) -> None:
    """On the host network and without capabilities, it cannot open the file, and takes nothing else that counts."""
    with holding(INTRUDER, *OTHER_ROOT):
        InstanceLock().close()


def test_no_other_user_can_open_the_lock(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the modes of folder and file were: the kubelet creates the folder with 0755."""
    folder = tmp_path / "pykubeproxy"
    monkeypatch.setattr(instance_lock, "FOLDER", folder)
    InstanceLock().close()
    (file,) = folder.iterdir()
    for mode in (0o700, 0o755):
        folder.chmod(mode)
        file.chmod(mode)
        with InstanceLock():
            assert (folder.stat().st_mode & 0o7777, file.stat().st_mode & 0o7777) == (0o700, 0o600)


def test_error_without_the_folder_says_what_to_mount(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a read-only root."""
    monkeypatch.setattr(instance_lock, "FOLDER", Path("/proc/none"))
    with pytest.raises(KernelError, match=r"cannot open the instance lock /proc/none.*mount /proc/none from"):
        InstanceLock()


def test_a_waiting_process_gets_the_lock_when_the_holder_is_killed(inside: str) -> None:
    """One of several only; the other one goes on waiting."""
    with holding() as first, started(WAIT) as second, started(WAIT) as third:
        for process in (second, third):
            assert line(process).startswith(f"process {first.pid} (")
        first.kill()
        first.wait()
        eventually(lambda: instance_lock.lock_holder().split(" (")[0] != "in another container")
        (new,) = (
            waiting
            for waiting in (second, third)
            if f"process {waiting.pid} (" in instance_lock.lock_holder()
        )
        assert line(new) == "held"
        new.kill()
        assert line(third if new is second else second) == "held"


def test_a_holder_in_another_container_is_awaited(inside: str) -> None:
    """Processes of two pods see no pid of each other."""
    with holding() as first, started(WAIT, *IN_A_CONTAINER) as other:
        assert line(other) == "in another container"
        first.kill()
        assert line(other) == "held"
        other.communicate("\n")


def test_a_holder_in_a_container_knows_that_another_one_waits(inside: str) -> None:
    """Without its pid, and not for longer than it waits."""
    program = (
        "from pykubeproxy.kernel import InstanceLock; lock = InstanceLock(); print('held', flush=True)\n"
    )
    program += "while True: input(); print(*lock.waiting(), flush=True)"
    with holding(program, *IN_A_CONTAINER) as first:

        def waiting() -> str:
            assert first.stdin is not None
            first.stdin.write("\n")
            first.stdin.flush()
            return line(first)

        with started(WAIT) as other:
            line(other)
            eventually(lambda: waiting() == "in another container")
        assert waiting() == ""


def test_the_holder_knows_who_waits(inside: str) -> None:
    """Not those that only asked who holds it, nor those that have ended; `close` ends the wait."""
    lock = InstanceLock()
    with pytest.raises(AlreadyRunning):
        InstanceLock()
    assert lock.waiting() == ()
    with started(WAIT) as other:
        assert line(other).startswith(f"process {os.getpid()} (")
        eventually(lock.waiting)
        (one,) = lock.waiting()
        assert one.startswith(f"process {other.pid} (")
    assert lock.waiting() == ()
    with started(WAIT) as other:
        line(other)
        eventually(lock.waiting)
        lock.close()
        assert line(other) == "held"


def lock_file() -> Path:
    return instance_lock.FOLDER / f"net-{Path('/proc/thread-self/ns/net').stat().st_ino}.lock"


def test_a_process_that_waits_while_the_file_is_deleted_waits_for_the_new_one(inside: str) -> None:
    """A third process has locked that by the time the first one ends."""
    with holding() as first, started(WAIT) as second:
        assert line(second).startswith(f"process {first.pid} (")
        lock_file().unlink()
        with holding() as third:
            first.kill()
            first.wait()
            eventually(lambda: len(lockers(lock_file(), waiting=True)) == 1)
            third.kill()
            assert line(second) == "held"


@pytest.mark.parametrize("replaced", [False, True])
def test_the_holder_restores_a_deleted_file(inside: str, replaced: bool) -> None:
    """The new one has the same modes, keeps others out, and those that wait for the old one wait for it."""
    with InstanceLock() as lock, started(WAIT) as other:
        assert line(other).startswith(f"process {os.getpid()} (")
        assert not lock.restore()
        lock_file().unlink()
        if replaced:
            lock_file().touch(0o644)
        assert lock.restore()
        assert not lock.restore()
        assert lock_file().stat().st_mode & 0o7777 == 0o600
        eventually(lock.waiting)
        with pytest.raises(AlreadyRunning):
            InstanceLock()
        lock.close()
        assert not lock.restore()
        assert line(other) == "held"


def test_a_holder_notices_that_another_process_has_locked_a_new_file(inside: str) -> None:
    with InstanceLock() as lock:
        lock_file().unlink()
        with holding() as other:
            with pytest.raises(AlreadyRunning, match=f"process {other.pid} "):
                lock.restore()
            other.kill()
            other.wait()
            assert lock.restore()


def test_the_holder_restores_a_deleted_folder(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or says that it cannot, as in a container, whose mount of the folder is dead."""
    folder = tmp_path / "pykubeproxy"
    monkeypatch.setattr(instance_lock, "FOLDER", folder)
    with InstanceLock() as lock:
        shutil.rmtree(folder)
        assert lock.restore()
        shutil.rmtree(folder)
        folder.touch()
        with pytest.raises(KernelError, match=f"cannot open the instance lock {folder}"):
            lock.restore()
