"""A session with iptables-restore, which applies each block while the caller renders the next one."""

from collections import deque
from types import TracebackType
from typing import Protocol

from pykubeproxy.kernel.errors import Failed
from pykubeproxy.kernel.rejection import Input, explain
from pykubeproxy.kernel.runner import LARGEST_PIPE, Command, Runner
from pykubeproxy.kernel.tools import Tools, lock_options

# For each new chain name libxtables searches the names it knows, in 512 lists that only grow. With 55,000 chains of
# iptables-nft, in blocks of 200, a fresh command every 50 blocks saves a fifth of the time.
_BLOCKS_PER_COMMAND = 50
_END_OF_BLOCK = "COMMIT\n"
# How many characters to keep before the newest text, to explain a failure. iptables names a line that it has just read
# (nft: a line of the block just read), and the pipe to it holds no more than this.
_KEPT = LARGEST_PIPE + (1 << 16)


class RestoreSession(Protocol):
    """A writer of restore input: the real session or a test double."""

    def write(self, text: str) -> None: ...


class IptablesSession:
    """Write restore input to iptables-restore --noflush. A context manager; leaving it waits until all is in force.

    Each block up to COMMIT takes effect completely or not at all, and leaves chains that it does not name unchanged. A
    rejected block ends the session. If the `with` body fails, the command is killed. `seconds` limits the time in which a
    command makes no progress. Both `write` and leaving raise Rejected, LockHeld, TimedOut, NotPermitted
    and Failed.
    """

    def __init__(self, tools: Tools, runner: Runner, seconds: float) -> None:
        self._argv = (tools.restore, "--noflush", "--counters", *lock_options(tools))
        self._runner = runner
        self._seconds = seconds
        self._command: Command | None = None
        self._blocks = 0
        self._lines_before = 0
        self._lines_skipped = 0
        self._kept: deque[str] = deque()
        self._kept_length = 0

    def __enter__(self) -> "IptablesSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            if self._command:
                self._command.kill()

    def write(self, text: str) -> None:
        """Write text that does not go beyond the end of a block. The first text starts the command."""
        if not text:
            return
        if self._command is None:
            self._command = self._runner.start(self._argv, self._seconds, die_with_parent=True)
        self._command.write(text)
        if self._command.stopped_reading:
            self._finish()
            return
        self._keep(text)
        if text.endswith(_END_OF_BLOCK):
            self._blocks += 1
            if self._blocks == _BLOCKS_PER_COMMAND:
                self._finish()

    def _finish(self) -> None:
        """Wait for the end of the command. Raises the errors of `write`."""
        if self._command is None:
            return
        command, self._command = self._command, None
        with command:
            outcome = command.finish()
        if not outcome.exit_code and command.stopped_reading:
            raise Failed(self._argv[0], 0, "it stopped reading its input")
        if outcome.exit_code:
            read = Input("".join(self._kept), self._lines_before, self._lines_skipped)
            raise explain(self._argv[0], outcome.exit_code, outcome.stderr, self._runner.lock_file, read)
        self._lines_before += self._lines_skipped + sum(text.count("\n") for text in self._kept)
        self._blocks = self._lines_skipped = self._kept_length = 0
        self._kept.clear()

    def _keep(self, text: str) -> None:
        """Keep written text. Keep all of the newest: it may not be in the pipe yet."""
        while self._kept and self._kept_length - len(self._kept[0]) >= _KEPT:
            oldest = self._kept.popleft()
            self._kept_length -= len(oldest)
            self._lines_skipped += oldest.count("\n")
        self._kept.append(text)
        self._kept_length += len(text)
