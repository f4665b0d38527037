"""Kernel settings under /proc/sys, by names such as net/netfilter/nf_conntrack_tcp_be_liberal."""

from pathlib import Path

from pykubeproxy.kernel.errors import KernelError

ROOT = Path("/proc/sys")


class SysctlError(KernelError):
    """A setting could not be read or written."""

    def __init__(self, name: str, action: str, error: OSError, to: str = "") -> None:
        super().__init__(f"cannot {action} the kernel setting {name}{to}: {error.strerror}")
        self.name = name
        self.errno = error.errno


def read(name: str, root: Path = ROOT) -> str | None:
    """A setting's value; None where this kernel or network namespace has none. Raises SysctlError."""
    try:
        return (root / name).read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SysctlError(name, "read", error) from error


def write(name: str, value: str | int, root: Path = ROOT) -> None:
    """Give a setting a value. Raises SysctlError: no such setting, no permission, a bad value."""
    try:
        # Opened for update, so that a wrong root does not gain a file.
        with (root / name).open("r+") as file:
            file.write(str(value))
    except OSError as error:
        raise SysctlError(name, "set", error, f" to {value}") from error
