"""Write rules with iptables-restore, and turn its failures into errors that name the line.

A session applies each block while the caller renders the next one.
"""

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from pykubeproxy.kernel.errors import Failed, KernelError, LockHeld, NotPermitted, Rejected
from pykubeproxy.kernel.runner import LARGEST_PIPE, Runner, RunningCommand
from pykubeproxy.kernel.system import capabilities, lockers, process

# The forms in which iptables 1.6 to 1.8 name a line:
#   line 12: CHAIN_ADD failed (File exists): chain X         nft, rejected by the kernel
#   iptables-restore: line 12 failed: Bad rule (...)         nft adds a reason, legacy none
#   Error occurred at line: 12                               not parsed; the reason comes before
#   iptables-restore: COMMIT expected at line 12
_LINE = re.compile(r"^line (\d+): |\bline (\d+) failed\b|(?:occurred|expected) at line:? (\d+)", re.MULTILINE)
_REASON_AFTER = re.compile(r"^line \d+: (.+)$|line \d+ failed: (.+)$", re.MULTILINE)
_PROGRAM = re.compile(r"^ip6?tables(?:-nft|-legacy)?(?:-restore)?(?: v[\d.]+(?: \(\w+\))?)?: ?")
_NOISE = re.compile(r"^(?:Try `|Error occurred at line|# Warning|Ignoring deprecated|Using intrapositioned)")
_NO_CHAIN = re.compile(r"Chain '([^']+)' does not exist")

_NO_TABLE = "unable to initialize table"
# How much of a command line errors show, in characters.
_LONGEST_COMMAND = 100
# For each new chain name libxtables searches the names it knows, in 512 lists that only grow. A fresh command for this
# many characters saves a fifth of the time with 55,000 chains.
_TEXT_PER_COMMAND = 3_000_000
_END_OF_BLOCK = "COMMIT\n"
# How many characters to keep before the newest text, to explain a failure. iptables names a line that it has just read
# (nft: a line of the block just read), and the pipe to it holds no more than this.
_KEPT = LARGEST_PIPE + (1 << 16)


class Input(NamedTuple):
    """The end of the input that iptables-restore read, and how many lines came before it.

    `lines_before` were read by earlier commands of the same session, `lines_skipped` by this one.
    """

    text: str = ""
    lines_before: int = 0
    lines_skipped: int = 0


NO_INPUT = Input()


def explain(command: str, exit_code: int, stderr: str, lock_file: str, read: Input = NO_INPUT) -> KernelError:
    """Return the error for a command of iptables that ended with a non-zero exit code after this input."""
    message = _message(stderr)
    if "holding the xtables lock" in stderr:
        return _lock_held(lock_file)
    if "can't open lock file" in stderr:
        return Failed(command, exit_code, f"{message}; it must be a writable file")
    if "Permission denied" in stderr or "Operation not permitted" in stderr:
        return NotPermitted(command, message, "CAP_NET_ADMIN and, for legacy, CAP_NET_RAW")
    # iptables-legacy-restore reports a missing raw socket and a missing module in the same way.
    if _NO_TABLE in stderr and "CAP_NET_RAW" not in capabilities():
        return NotPermitted(command, message, "CAP_NET_RAW")
    match = _LINE.search(stderr)
    if match is None:
        return Failed(command, exit_code, message)
    lines = read.text.split("\n")
    number = _culprit(lines, int(match[1] or match[2] or match[3]) - read.lines_skipped, stderr)
    line = lines[number - 1] if 0 < number <= len(lines) else ""
    if line.startswith("*"):
        # A missing permission or module makes the whole table unavailable: blame no rule.
        return Failed(command, exit_code, message)
    if message == "failed":
        whole = "the kernel rejected the block and does not say which rule is the reason"
        message = whole if line == "COMMIT" else "iptables does not say why"
    return Rejected(read.lines_before + read.lines_skipped + number, line, message, exit_code)


def _lock_held(lock_file: str) -> LockHeld:
    pid = next((pid for pid in lockers(Path(lock_file)) if pid > 0), None)
    running = process(pid) if pid else None
    return LockHeld(lock_file, pid, " ".join(running.arguments)[:_LONGEST_COMMAND] if running else "")


def _culprit(lines: list[str], number: int, stderr: str) -> int:
    """Return the number of the line to blame, which is not always the one that iptables names.

    iptables-nft notices a jump to a missing chain only at COMMIT, and names that line.
    """
    if missing := _NO_CHAIN.search(stderr):
        jump = re.compile(rf" -[jg] {re.escape(missing[1])}(?: |$)")
        for at in range(min(number, len(lines)), 0, -1):
            if jump.search(lines[at - 1]):
                return at
            if lines[at - 1].startswith("*"):
                break
    return number


def _message(stderr: str) -> str:
    """Return the reason without the program's name, line numbers and advice on usage."""
    if after := _REASON_AFTER.search(stderr):
        return after[1] or after[2]
    lines = [_PROGRAM.sub("", line.strip()) for line in stderr.splitlines()]
    reasons = [line for line in lines if line and not _NOISE.match(line)]
    return re.sub(r"^line \d+ (?=failed$)", "", "; ".join(reasons))


class RestoreSession(Protocol):
    """A writer of restore input: the real session or a test double."""

    def write(self, text: str) -> None: ...


class IptablesSession:
    """Write restore input to iptables-restore --noflush. A context manager; leaving it waits until all is in force.

    Each block up to COMMIT takes effect completely or not at all, and leaves chains that it does not name unchanged. A
    rejected block ends the session. If the `with` body fails, the command is killed. `seconds` limits the time in which a
    command makes no progress. Calls `note` with each text before it is written. Both `write` and leaving raise Rejected,
    LockHeld, TimedOut, NotPermitted and Failed.
    """

    def __init__(
        self,
        command: str,
        options: tuple[str, ...],
        runner: Runner,
        seconds: float,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._note = note
        self._argv = (command, "--noflush", "--counters", *options)
        self._runner = runner
        self._seconds = seconds
        self._command: RunningCommand | None = None
        self._written = 0
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
        if self._written >= _TEXT_PER_COMMAND and self._kept[-1].endswith(_END_OF_BLOCK):
            # Not before: the caller has rendered this text while the command worked.
            self._finish()
        self._note(text)
        if self._command is None:
            self._command = self._runner.start(self._argv, self._seconds, die_with_parent=True)
        self._command.write(text)
        if self._command.stopped_reading:
            self._finish()
            return
        self._keep(text)

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
        self._written = self._lines_skipped = self._kept_length = 0
        self._kept.clear()

    def _keep(self, text: str) -> None:
        """Keep written text. Keep all of the newest: it may not be in the pipe yet."""
        while self._kept and self._kept_length - len(self._kept[0]) >= _KEPT:
            oldest = self._kept.popleft()
            self._kept_length -= len(oldest)
            self._lines_skipped += oldest.count("\n")
        self._kept.append(text)
        self._kept_length += len(text)
        self._written += len(text)
