"""Run commands in the C locale; kill those that make no progress, with their children."""

import contextlib
import fcntl
import functools
import os
import selectors
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from pykubeproxy.kernel.errors import Failed, Missing, NotStarted, TimedOut

# Services often start with a PATH that lacks the folders of iptables.
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
DEFAULT_LOCK_FILE = "/run/xtables.lock"
_SECONDS_TO_DIE = 5
# How many times its limit without progress a command may take in all, so that one that prints forever ends too.
_LONGEST = 10
_READ = 1 << 16  # bytes
LARGEST_PIPE = 1 << 20  # bytes, the default maximum of the kernel for any user
_running: set[subprocess.Popen[bytes]] = set()


class CommandResult(NamedTuple):
    """How a command ended. A negative exit code is the number of the signal that killed it."""

    exit_code: int
    stdout: str
    stderr: str


class RunningCommand:
    """A running command. A context manager: a command that has not ended on exit is killed, with its children.

    The command reads while the caller prepares the next text. `seconds` limits the time without progress: the command
    takes input, prints something or ends. In all it may take `_LONGEST` times as long. `stopped_reading` tells whether it
    closed its input before it had read everything. `write` gets the standard output piece by piece; without it, memory
    holds all of it.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        seconds: float,
        progress: Callable[[], None] = lambda: None,
        write: Callable[[bytes], None] | None = None,
    ) -> None:
        assert process.stdin and process.stdout and process.stderr
        _running.add(process)
        self._name = name
        self._process = process
        self._seconds = seconds
        self._end = time.monotonic() + _LONGEST * seconds
        self._progress = progress
        self._progressed()
        self._stdin = process.stdin
        self._unwritten = memoryview(b"")
        self.stopped_reading = False
        self._output = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        self._write_output = {process.stdout.fileno(): write} if write else {}
        self._selector = selectors.DefaultSelector()
        os.set_blocking(self._stdin.fileno(), False)
        self._selector.register(self._stdin, selectors.EVENT_WRITE)
        for output in self._output:
            self._selector.register(output, selectors.EVENT_READ)

    def __enter__(self) -> "RunningCommand":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def write(self, text: str) -> None:
        """Wait until the command has taken the previous text, then write this one without waiting for it to be read.

        Raises TimedOut.
        """
        self._progressed()  # the time to render the text is not the command's
        self._exchange(lambda: bool(self._unwritten))
        if self.stopped_reading:
            return
        data = text.encode("utf-8", "surrogateescape")
        pipe = self._stdin.fileno()
        if len(data) > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
            # Let the pipe hold all of it, so that the command can read meanwhile. Not more: iptables-restore applies what
            # is in the pipe even if this process is killed.
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, min(len(data), LARGEST_PIPE))
        self._unwritten = memoryview(data)
        self._write_some()

    def finish(self) -> CommandResult:
        """Write the rest, close the command's input and wait for its end. Raises TimedOut."""
        self._progressed()
        self._exchange(lambda: bool(self._unwritten))
        self._close_stdin()
        self._exchange(lambda: bool(self._selector.get_map()))
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimedOut(self._name, self._seconds) from None
        out, err = (output.decode("utf-8", "surrogateescape") for output in self._output.values())
        return CommandResult(self._process.returncode, out, err)

    def kill(self) -> None:
        """Kill the command and its children if it still runs, and close the pipes to it."""
        _running.discard(self._process)
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                # A command that hangs in the kernel does not end; do not wait for it.
                self._process.wait(timeout=_SECONDS_TO_DIE)
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _exchange(self, unfinished: Callable[[], bool]) -> None:
        """Write and read until nothing is unfinished. Raises TimedOut."""
        while unfinished():
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(self._name, self._seconds)
            for key, _ in self._selector.select(left):
                self._progressed()
                if key.fd not in self._output:
                    self._write_some()
                elif data := os.read(key.fd, _READ):
                    self._write_output.get(key.fd, self._output[key.fd].extend)(data)
                else:
                    self._selector.unregister(key.fd)

    def _progressed(self) -> None:
        self._deadline = min(time.monotonic() + self._seconds, self._end)
        self._progress()

    def _write_some(self) -> None:
        try:
            self._unwritten = self._unwritten[os.write(self._stdin.fileno(), self._unwritten) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unwritten = memoryview(b"")
            self.stopped_reading = True
            self._close_stdin()

    def _close_stdin(self) -> None:
        if not self._stdin.closed:
            self._selector.unregister(self._stdin)
            self._stdin.close()


class Runner(msgspec.Struct, frozen=True):
    """Run commands, here or behind a prefix such as ("ip", "netns", "exec", NAME).

    `environment` overrides that of this process; XTABLES_LOCKFILE in it names another lock file for the legacy tables.
    `started` is called with the process id of each command before it gets any input, `progress` when a command starts
    and whenever it takes input or gives output.
    """

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    started: Callable[[int], None] | None = None
    progress: Callable[[], None] = lambda: None

    def has(self, command: str) -> bool:
        """Return whether the command is on PATH or in a system folder."""
        return shutil.which(command, path=self._environment()["PATH"]) is not None

    def start(
        self,
        argv: Sequence[str],
        seconds: float = 60,
        die_with_parent: bool = False,
        write: Callable[[bytes], None] | None = None,
    ) -> RunningCommand:
        """Start a command that gets its input piece by piece. Raises Missing, NotStarted.

        With `write`, it also gives its output piece by piece, see `RunningCommand`. With `die_with_parent`, the kernel
        kills the command when the calling thread ends, also if it is killed. This adds 1 ms.
        """
        self.progress()
        wrapper: tuple[str, ...] = ()
        if die_with_parent:
            if not self.prefix and not self.has(argv[0]):
                raise Missing(argv[0], "that has it")
            wrapper = killed_with_parent()
        try:
            process = subprocess.Popen(
                [*self.prefix, *wrapper, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment(),
                process_group=0,  # a group of its own, so that it can be killed with all that it started
            )
        except FileNotFoundError:
            raise Missing([*self.prefix, *argv][0], "that has it") from None
        except OSError as error:
            raise NotStarted([*self.prefix, *argv][0], error.strerror or str(error)) from None
        if self.started:
            self.started(process.pid)
        return RunningCommand(argv[0], process, seconds, self.progress, write)

    def run(self, argv: Sequence[str], text: str = "", seconds: float = 60) -> CommandResult:
        """Run a command with `text` on its standard input and wait for its end.

        Bytes that are not UTF-8 pass through as surrogates, so that foreign rules cannot break a reader. Raises
        Missing if there is no such command, NotStarted if it cannot be run, TimedOut after `seconds` without progress.
        """
        with self.start(argv, seconds) as command:
            if text:
                command.write(text)
            return command.finish()

    def copy(self, argv: Sequence[str], write: Callable[[bytes], None], seconds: float = 60) -> CommandResult:
        """Run a command, and call `write` with each piece of its standard output. Raises as `run` does.

        An exception from `write` kills the command.
        """
        with self.start(argv, seconds, write=write) as command:
            return command.finish()

    def read(self, path: str) -> str | None:
        """Return the contents of a /proc or /sys file as seen behind the prefix; None if there is none.

        Raises Failed if the command that reads behind the prefix is killed.
        """
        if self.prefix:
            outcome = self.run(("cat", path))
            if outcome.exit_code < 0:
                raise Failed(f"cat {path}", outcome.exit_code, outcome.stderr.strip())
            return outcome.stdout if outcome.exit_code == 0 else None
        try:
            return Path(path).read_text()
        except OSError:
            return None

    @property
    def lock_file(self) -> str:
        """Return the path of the file that iptables-legacy locks."""
        return self._environment().get("XTABLES_LOCKFILE", DEFAULT_LOCK_FILE)

    def _environment(self) -> dict[str, str]:
        merged = {**os.environ, **self.environment, "LC_ALL": "C"}
        folders = [*filter(None, merged.get("PATH", os.defpath).split(os.pathsep))]
        folders += [folder for folder in _SYSTEM_FOLDERS if folder not in folders]
        return {**merged, "PATH": os.pathsep.join(folders)}


def protect_lock_file(path: str) -> None:
    """Let no other user open the file that iptables-legacy locks: a user who may read it can hold the lock.

    Raises OSError. Does nothing if it is missing: iptables creates it with this mode.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):  # XTABLES_LOCKFILE may name /dev/null
            os.fchmod(file, 0o600)
    finally:
        os.close(file)


def kill_commands() -> None:
    """Kill all running commands with their children, before this process ends by force. Any thread may call it."""
    for process in tuple(_running):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@functools.cache
def killed_with_parent() -> tuple[str, ...]:
    """Return the command before which another one is killed when its parent ends; () if setpriv is missing or too old.

    What the pipe holds would otherwise be written after a successor has started. A preexec_fn makes Python fork instead
    of vfork, which takes 5 ms at 300 MB.
    """
    wrapper = ("setpriv", "--pdeathsig", "KILL", "--")
    try:
        tried = subprocess.run((*wrapper, "true"), capture_output=True, check=False)
    except OSError:
        return ()
    return () if tried.returncode else wrapper
