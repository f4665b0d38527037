"""Errors of requests to the kernel, each with what the user can do about it.

`require_linux` and `require_node` check that this system and this installation can serve such requests at all.
"""

import sys
from importlib.util import find_spec

# From the messages of ENOMEM, ENOBUFS, ENOSPC, EMSGSIZE, EMFILE, ENFILE and EAGAIN, in lower case.
_SHORTAGES = (
    *("memory", "no buffer space", "no space left", "message too long", "too many open files"),
    "resource temporarily unavailable",
)


class KernelError(Exception):
    """A request to the kernel, or to a tool that talks to it, failed."""


class Missing(KernelError):
    """A command is not installed."""

    def __init__(self, command: str, package: str) -> None:
        super().__init__(f"{command} not found on PATH; install the package {package}")


class UnsupportedFamily(KernelError):
    """Kernel or iptables lack what rules of an IP family need."""


class NotStarted(KernelError):
    """A command exists but could not be started: no memory, too many processes, not executable."""

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(f"cannot start {command}: {reason}")


class TimedOut(KernelError):
    """A command made no progress for some time and was killed, with everything it started."""

    def __init__(self, command: str, seconds: float) -> None:
        super().__init__(f"{command} made no progress for {seconds:g} s and was killed")


class Failed(KernelError):
    """A command failed, and no line of its input is the reason."""

    def __init__(self, command: str, exit_code: int, message: str) -> None:
        ending = (
            f"failed with exit code {exit_code}" if exit_code >= 0 else f"was killed by signal {-exit_code}"
        )
        super().__init__(f"{command} {ending}: {message or 'it gave no reason'}")


class Unreadable(Failed):
    """A table or built-in chain holds rules that iptables cannot show, such as those made with nft."""


class NotPermitted(KernelError):
    """The process lacks a capability."""

    def __init__(self, what: str, message: str, capabilities: str = "CAP_NET_ADMIN") -> None:
        super().__init__(f"needs root or {capabilities}: {what}: {message}")
        self.message = message


class Rejected(KernelError):
    """iptables-restore rejected a line of its input.

    The block (up to COMMIT) with the line had no effect; blocks before it are in force. `line_number` starts at 1. Legacy,
    and nft up to 1.8.7, do not report which line it was: see `whole_block`.
    """

    def __init__(self, line_number: int, line: str, message: str, exit_code: int) -> None:
        super().__init__(f"iptables-restore rejected line {line_number}, {line!r}: {message}")
        self.line_number = line_number
        self.line = line
        self.message = message
        self.exit_code = exit_code

    @property
    def whole_block(self) -> bool:
        """Whether the line is the end of the block, so that any rule in the block may be the reason."""
        return self.line == "COMMIT"

    @property
    def is_shortage(self) -> bool:
        """Whether the kernel ran out of something, such as memory; then no line is to blame."""
        return any(words in self.message.lower() for words in _SHORTAGES)


class LockHeld(KernelError):
    """Another program held the lock of the legacy tables until our timeout; `command` is its command line, if known."""

    def __init__(self, lock_file: str, holder: int | None, command: str = "") -> None:
        who = f"by process {holder}" if holder else "by a process that is not visible from here"
        who += f" ({command})" if command else ""
        super().__init__(f"the lock {lock_file} is held {who}; end that process or wait for it")


_SYSTEMS = {"darwin": "macOS"}
# The modules of the extras in pyproject.toml.
_NODE = ("h11", "iptc", "prometheus_client", "pyroute2")
_LAB = (*_NODE, "wsproto")


class NotANode(KernelError):
    """This system or installation cannot do what only a node can."""


def require_linux(alternative: str = "") -> None:
    """Raise NotANode on another system than Linux; `alternative` is what the user can do besides."""
    if sys.platform != "linux":
        system = _SYSTEMS.get(sys.platform, sys.platform)
        raise NotANode(f"{system} has no iptables; run this command on a Linux node{alternative}")


def require_node(modules: tuple[str, ...] = _NODE, extra: str = "node") -> None:
    """Raise NotANode on another system than Linux, or without these modules of an extra."""
    require_linux()
    if missing := [module for module in modules if find_spec(module) is None]:
        raise NotANode(
            f"Python modules not installed: {', '.join(missing)}; run pip install 'pykubeproxy[{extra}]'"
        )


def require_lab() -> None:
    """Raise NotANode on another system than Linux, or without the modules of the extra `lab`."""
    require_node(_LAB, "lab")
