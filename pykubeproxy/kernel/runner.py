"""Running a command: found on PATH, in plain C locale, with a time limit, and nothing left of it."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pykubeproxy.kernel.errors import Missing, TimedOut

# Services often start with a PATH without the folders where iptables lives.
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
DEFAULT_LOCK_FILE = "/run/xtables.lock"
_SECONDS_TO_DIE = 5


class Outcome(NamedTuple):
    """How a command ended. A negative exit code is the number of the signal that killed it."""

    exit_code: int
    stdout: str
    stderr: str


class Runner(msgspec.Struct, frozen=True):
    """Runs commands, here or behind a prefix such as ("ip", "netns", "exec", NAME).

    `environment` adds to, and wins over, this process's own; XTABLES_LOCKFILE among it names another lock
    file for the legacy tables.
    """

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}

    def has(self, command: str) -> bool:
        """Whether the command is on PATH or in a system folder."""
        return shutil.which(command, path=self._environment()["PATH"]) is not None

    def run(self, argv: Sequence[str], text: str = "", seconds: float = 60) -> Outcome:
        """Run a command with `text` on its standard input and wait for its end.

        Bytes that are not UTF-8 pass through as surrogates, so that foreign rules cannot break a reader.
        Raises Missing if there is no such command, TimedOut after `seconds`.
        """
        try:
            # A process group of its own, so that a hung command goes with all that it started.
            process = subprocess.Popen(
                [*self.prefix, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment(),
                process_group=0,
            )
        except FileNotFoundError:
            raise Missing([*self.prefix, *argv][0], "that has it") from None
        try:
            out, err = process.communicate(text.encode("utf-8", "surrogateescape"), timeout=seconds)
        except subprocess.TimeoutExpired:
            raise TimedOut(argv[0], seconds) from None
        finally:
            _end(process)
        return Outcome(process.returncode, _decode(out), _decode(err))

    def read(self, path: str) -> str | None:
        """The contents of a /proc or /sys file as seen behind the prefix; None where there is none."""
        if self.prefix:
            outcome = self.run(("cat", path))
            return outcome.stdout if outcome.exit_code == 0 else None
        try:
            return Path(path).read_text()
        except OSError:
            return None

    @property
    def lock_file(self) -> str:
        """The file on which iptables-legacy takes its lock."""
        return self._environment().get("XTABLES_LOCKFILE", DEFAULT_LOCK_FILE)

    def _environment(self) -> dict[str, str]:
        merged = {**os.environ, **self.environment, "LC_ALL": "C"}
        folders = [*filter(None, merged.get("PATH", os.defpath).split(os.pathsep))]
        folders += [folder for folder in _SYSTEM_FOLDERS if folder not in folders]
        return {**merged, "PATH": os.pathsep.join(folders)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command that still runs, and its children, and close the pipes to it."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # One that is stuck in the kernel does not die of this; it is not worth waiting for.
            process.wait(timeout=_SECONDS_TO_DIE)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
