"""What can go wrong between us and the kernel, each with what the user can do about it."""

# From the texts of ENOMEM, ENOBUFS, ENOSPC, EMSGSIZE, EMFILE and ENFILE, EAGAIN, in small letters.
_SHORTAGES = (
    *("memory", "no buffer space", "no space left", "message too long", "too many open files"),
    "resource temporarily unavailable",
)


class KernelError(Exception):
    """A request to the kernel, or to a tool that talks to it, could not be carried out."""


class Missing(KernelError):
    """A command is not installed."""

    def __init__(self, command: str, package: str) -> None:
        super().__init__(f"{command} was not found on PATH; install the package {package}")
        self.command = command


class NotStarted(KernelError):
    """A command is there, but no process could be made for it: no memory, too many processes, not executable."""

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(f"{command} could not be started: {reason}")
        self.command = command


class TimedOut(KernelError):
    """A command did not end in time and was killed, with everything it had started."""

    def __init__(self, command: str, seconds: float) -> None:
        super().__init__(f"{command} did not end within {seconds:g} s and was killed")
        self.command = command
        self.seconds = seconds


class Failed(KernelError):
    """A command failed for a reason that no line of its input accounts for."""

    def __init__(self, command: str, exit_code: int, message: str) -> None:
        ending = (
            f"failed with exit code {exit_code}" if exit_code >= 0 else f"was killed by signal {-exit_code}"
        )
        super().__init__(f"{command} {ending}: {message or 'it gave no reason'}")
        self.command = command
        self.exit_code = exit_code
        self.message = message


class Unreadable(Failed):
    """A table or a built-in chain holds rules that iptables cannot show, such as may be made with nft."""


class NotPermitted(KernelError):
    """The process lacks a capability."""

    def __init__(self, what: str, message: str, capabilities: str = "CAP_NET_ADMIN") -> None:
        super().__init__(f"{what}: {message}; run as root or with {capabilities}")
        self.message = message


class Refused(KernelError):
    """iptables-restore did not accept a line of its input.

    The block (up to COMMIT) that holds the line had no effect; blocks before it are in force. `line_number`
    counts from 1. Legacy, and nft up to 1.8.7, cannot tell which line it was: see `whole_block`.
    """

    def __init__(self, line_number: int, line: str, message: str, exit_code: int) -> None:
        super().__init__(f"iptables-restore refused line {line_number}, {line!r}: {message}")
        self.line_number = line_number
        self.line = line
        self.message = message
        self.exit_code = exit_code

    @property
    def whole_block(self) -> bool:
        """True when the line is only the end of the refused block, and any rule in it may be the cause."""
        return self.line == "COMMIT"

    @property
    def is_shortage(self) -> bool:
        """True when the kernel was out of something, such as memory: no line is to blame for that."""
        message = self.message.lower()
        return any(words in message for words in _SHORTAGES)


class LockHeld(KernelError):
    """Another program, `command` if it can be told, held the lock of the legacy tables for as long as we waited."""

    def __init__(self, lock_file: str, holder: int | None, command: str = "") -> None:
        who = f"by process {holder}" if holder else "by a process that is not visible from here"
        who += f" ({command})" if command else ""
        super().__init__(f"the lock {lock_file} is held {who}; end it or let it finish")
        self.lock_file = lock_file
        self.holder = holder


class Lacking(KernelError):
    """Something that the rules cannot do without is not there: kernel modules, or parts of iptables."""

    def __init__(self, what: tuple[str, ...], advice: str) -> None:
        super().__init__(f"missing: {', '.join(what)}; {advice}")
        self.what = what
