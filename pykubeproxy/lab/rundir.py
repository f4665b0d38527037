"""What a running lab keeps in /run/pykubeproxy-lab/NAME: a lock, its state, its logs.

The lock is the kernel's and goes with the process that holds it, so a lab whose driver died is known by
a directory without a lock.
"""

import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

BASE = Path("/run/pykubeproxy-lab")
NAME = re.compile(r"[a-z][a-z0-9]{0,19}")


class AlreadyRunning(RuntimeError):
    """Another process drives a lab of this name."""


class RunDirectory:
    """The directory of one lab; nothing is made before `lock`.

    Raises ValueError for a name that is not one to twenty lower-case letters and digits, beginning with
    a letter: names of namespaces are built from it.
    """

    def __init__(self, lab: str) -> None:
        if not NAME.fullmatch(lab):
            raise ValueError(
                f"{lab!r} is no name for a lab: take up to 20 lower-case letters and digits, "
                "beginning with a letter"
            )
        self.lab = lab
        self.path = BASE / lab
        self._lock = -1

    def lock(self, patience: float = 0.0) -> None:
        """Make the directory and hold it for as long as this process lives.

        Waits up to `patience` seconds for another holder, then raises AlreadyRunning.
        """
        deadline = time.monotonic() + patience
        while not self._try_lock():
            if time.monotonic() > deadline:
                raise AlreadyRunning(
                    f"lab {self.lab!r} is there already; "
                    f"`pykubeproxy lab down --name {self.lab}` takes it down"
                )
            time.sleep(0.05)

    def _try_lock(self) -> bool:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return False  # just being removed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between our opening and our locking it.
            if os.fstat(descriptor).st_ino == (self.path / "lock").stat().st_ino:
                self._lock = descriptor
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return False

    @property
    def held(self) -> bool:
        """Whether some process drives the lab now."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Give the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def clear(self) -> None:
        """Remove what an earlier lab left in it."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def write_state(self, state: dict[str, object]) -> None:
        """Replace the state at once: a reader sees the old one or the new one."""
        handle, name = tempfile.mkstemp(dir=self.path)
        with os.fdopen(handle, "w") as out:
            json.dump(state, out, indent=2)
        Path(name).replace(self.path / "lab.json")

    def read_state(self) -> dict[str, object]:
        """What was written last; empty if nothing was."""
        try:
            state = json.loads((self.path / "lab.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return state if isinstance(state, dict) else {}

    def remove(self) -> None:
        """Take the directory away, and the one above it when it was the last."""
        doomed = BASE / f".{self.lab}-{os.getpid()}"
        try:
            self.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            BASE.rmdir()
        except OSError:
            pass  # not there, or other labs live next to it


def labs() -> list[str]:
    """The labs that have a directory, running or left over."""
    if not BASE.is_dir():
        return []
    return sorted(path.name for path in BASE.iterdir() if NAME.fullmatch(path.name))
