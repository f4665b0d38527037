"""Running a command: found on PATH, in plain C locale, with a time limit, and nothing left of it."""

import contextlib
import fcntl
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pykubeproxy.kernel.errors import Missing, NotStarted, TimedOut

# Services often start with a PATH without the folders where iptables lives.
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
DEFAULT_LOCK_FILE = "/run/xtables.lock"
_SECONDS_TO_DIE = 5
_PIECE = 1 << 16  # bytes
_LARGEST_PIPE = 1 << 20  # bytes, what the kernel lets everybody have by default


class Outcome(NamedTuple):
    """How a command ended. A negative exit code is the number of the signal that killed it."""

    exit_code: int
    stdout: str
    stderr: str


class Runner(msgspec.Struct, frozen=True):
    """Runs commands, here or behind a prefix such as ("ip", "netns", "exec", NAME).

    `environment` adds to, and wins over, this process's own; XTABLES_LOCKFILE among it names another lock
    file for the legacy tables. `started` is told the process number of each command before it gets any input.
    """

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    started: Callable[[int], None] | None = None

    def has(self, command: str) -> bool:
        """Whether the command is on PATH or in a system folder."""
        return shutil.which(command, path=self._environment()["PATH"]) is not None

    def run(self, argv: Sequence[str], text: str | Iterable[str] = "", seconds: float = 60) -> Outcome:
        """Run a command with `text` on its standard input and wait for its end.

        Text may come in pieces: then the command reads one while the next is made, and the time limit is for both.
        Bytes that are not UTF-8 pass through as surrogates, so that foreign rules cannot break a reader.
        Raises Missing if there is no such command, NotStarted if it cannot be run, TimedOut after `seconds`.
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
        except OSError as error:
            raise NotStarted([*self.prefix, *argv][0], error.strerror or str(error)) from None
        if self.started:
            self.started(process.pid)
        try:
            pieces = map(_encode, filter(None, [text] if isinstance(text, str) else text))
            out, err = _converse(process, pieces, time.monotonic() + seconds)
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


def _converse(
    process: subprocess.Popen[bytes], pieces: Iterator[bytes], deadline: float
) -> tuple[bytes, bytes]:
    """Write to a command and read what it says meanwhile, until it ends. Raises TimeoutExpired."""
    assert process.stdin and process.stdout and process.stderr
    said = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    rest: memoryview | None = memoryview(b"")
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        for output in said:
            selector.register(output, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(process.args, 0)
            for key, _ in selector.select(left):
                if key.fd in said:
                    said[key.fd] += (piece := os.read(key.fd, _PIECE))
                    if not piece:
                        selector.unregister(key.fd)
                elif (rest := _write(key.fd, rest, pieces)) is None:
                    selector.unregister(process.stdin)
                    process.stdin.close()
    process.wait(max(0.0, deadline - time.monotonic()))
    out, err = map(bytes, said.values())
    return out, err


def _write(pipe: int, rest: memoryview | None, pieces: Iterator[bytes]) -> memoryview | None:
    """Write `rest`, or else the next piece; what is left of it, None if there are no more or nobody reads them."""
    text = rest or _next(pieces, pipe)
    try:
        return text[os.write(pipe, text) :] if text else None
    except BlockingIOError:
        return text
    except BrokenPipeError:
        return None


def _next(pieces: Iterator[bytes], pipe: int) -> memoryview:
    """The next piece; the pipe is made to hold it, for the command to have something to read while another is made."""
    piece = next(pieces, b"")
    if len(piece) > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, min(len(piece), _LARGEST_PIPE))
    return memoryview(piece)


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


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
