"""The lab's footprint on the machine: its requirements, its run directory, and the cleanup.

/run/pykubeproxy-lab/NAME holds the state and the logs of a lab. The kernel releases the lock on it when its
driver ends, so a directory without a lock is a leftover. A janitor process waits for the driver's end, however
it ends, and cleans up; `lab down` does the same.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from pyroute2 import netns

from pykubeproxy.lab.network import lab_namespaces

BASE = Path("/run/pykubeproxy-lab")
NAME = re.compile(r"[a-z][a-z0-9]{0,19}")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS = ("iptables-save", "iptables-restore", "ip6tables-save", "ip6tables-restore")
CLEANUP_SECONDS = 5.0


class LabError(click.ClickException):
    """The lab cannot do what was requested; the message says what to do. The command prints it and exits with 2."""


class LabExists(LabError):
    """Another process runs a lab of this name."""


def check_requirements() -> None:
    """Raise LabError unless this process can build a lab on this machine."""
    if os.geteuid() != 0:
        raise LabError("the lab creates network namespaces and needs root; run it with sudo")
    missing = [tool for tool in TOOLS if shutil.which(tool, path=SYSTEM_PATH) is None]
    if missing:
        raise LabError(f"missing: {', '.join(missing)}; install them with `apt-get install iptables`")
    if not Path("/proc/sys/net/ipv6").exists():
        raise LabError("IPv6 is disabled in this kernel, and the lab needs it; boot without ipv6.disable=1")


class RunDirectory:
    """The directory of one lab; `lock` creates it.

    Raises LabError unless the name is 1 to 20 lower-case letters and digits, starting with a letter:
    namespace names contain it.
    """

    def __init__(self, lab: str) -> None:
        if not NAME.fullmatch(lab):
            raise LabError(
                f"invalid lab name {lab!r}; use up to 20 lower-case letters and digits, starting with a letter"
            )
        self.lab = lab
        self.path = BASE / lab
        self.logs = self.path / "logs"
        self.kubeconfig = self.path / "kubeconfig"
        self.requests = self.path / "requests"
        self._lock: int | None = None

    def lock(self, timeout: float = 0.0) -> None:
        """Create and lock the directory. Raises LabExists if another process holds it after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            if (descriptor := self._try_lock()) is not None:
                self._lock = descriptor
                return
            if time.monotonic() > deadline:
                raise LabExists(f'lab "{self.lab}" is running; choose another name with --name')
            time.sleep(0.05)

    def _try_lock(self) -> int | None:
        """Return a descriptor that holds the lock, or None if another process holds it."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the directory after it was opened here.
            if os.fstat(descriptor).st_ino == self.path.stat().st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    @property
    def held(self) -> bool:
        """Whether a process runs this lab."""
        descriptor = self._try_lock()
        if descriptor is None:
            return self.path.exists()
        os.close(descriptor)
        return False

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clear(self) -> None:
        """Remove the files of an earlier lab."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def write_state(self, state: dict[str, object]) -> None:
        """Replace the state atomically."""
        with tempfile.NamedTemporaryFile("w", dir=self.path, delete=False) as out:
            json.dump(state, out, indent=2)
        Path(out.name).replace(self.path / "lab.json")

    def read_state(self) -> dict[str, Any]:
        """Return the last state written, {} if there is none."""
        try:
            return dict(json.loads((self.path / "lab.json").read_text()))
        except FileNotFoundError:
            return {}

    def remove(self) -> None:
        """Remove the directory, and BASE with the last lab."""
        renamed = BASE / f".{self.lab}-{os.getpid()}"
        with contextlib.suppress(OSError):  # already removed, or other labs exist
            self.path.rename(renamed)
            shutil.rmtree(renamed, ignore_errors=True)
            BASE.rmdir()


def lab_names() -> list[str]:
    """Return the names of all labs with a directory, running or left over."""
    return sorted(path.name for path in BASE.glob("*") if NAME.fullmatch(path.name))


def clean_up(lab: str) -> None:
    """Kill all processes of a lab and remove its namespaces and directory."""
    remove_namespaces(lab)
    RunDirectory(lab).remove()


def remove_namespaces(lab: str) -> None:
    """Kill all processes in a lab's namespaces and remove the namespaces."""
    deadline = time.monotonic() + CLEANUP_SECONDS
    expired = False
    while not expired and (found := lab_namespaces(lab)):
        expired = time.monotonic() > deadline
        pids = processes_in(found)
        for pid in pids:
            end_process(pid, signal.SIGKILL, CLEANUP_SECONDS, lab)
        if expired or not pids:  # a killed process may have started another one: check again
            for name in found:
                with contextlib.suppress(OSError):  # another cleanup removes it at the same time
                    netns.remove(name)


def processes_in(namespaces: Iterable[str]) -> list[int]:
    """Return the processes in these network namespaces, without this one."""
    while True:
        with contextlib.suppress(ProcessLookupError):  # one ended while its namespace was read
            pids = netns.ns_pids()
            return [pid for name in namespaces for pid in pids.get(name, ()) if pid != os.getpid()]


def end_process(pid: int, number: signal.Signals, timeout: float, lab: str | None = None) -> None:
    """Signal a process and wait for its end; with `lab` only if it is still in a namespace of that lab."""
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as process:
        if lab is None or netns.pid_to_ns(pid) in lab_namespaces(lab):
            signal.pidfd_send_signal(process.fileno(), number)
            select.select([process], [], [], timeout)


def start_janitor(lab: str) -> subprocess.Popen[bytes]:
    """Start the process that cleans up after its standard input closes, that is, when this process ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "pykubeproxy.lab.machine", lab],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(lab: str) -> None:
    """Run the janitor."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    directory = RunDirectory(lab)
    try:
        # The kernel may close the driver's pipe a moment before it releases the lock.
        directory.lock(timeout=2.0)
    except LabExists:
        return  # a new lab of this name has cleaned up already
    clean_up(lab)


if __name__ == "__main__":
    main(sys.argv[1])
