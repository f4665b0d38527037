"""Turn the exit code and standard error of iptables-restore into an error that names the line."""

import re
from pathlib import Path
from typing import NamedTuple

from pykubeproxy.kernel.errors import Failed, KernelError, LockHeld, NotPermitted, Rejected
from pykubeproxy.kernel.processes import lockers, process
from pykubeproxy.kernel.system import capabilities

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
