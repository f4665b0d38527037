"""Find the iptables commands of a backend, and their version."""

import enum
import re

import msgspec

from pykubeproxy.kernel.errors import Failed, Missing
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.objects import Family

_VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)(?:\s+\((\w+)\))?")
_PROGRAM = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
PACKAGE = "iptables (on some distributions iptables-nft or iptables-legacy)"


class Backend(enum.Enum):
    """The kernel subsystem that holds the rules: nf_tables, or the older x_tables."""

    NFT = "nft"
    LEGACY = "legacy"


class Tools(msgspec.Struct, frozen=True):
    """The commands for one backend and family, and their version such as (1, 8, 9)."""

    backend: Backend
    family: Family
    main: str
    save: str
    restore: str
    version: tuple[int, int, int]


def find_tools(backend: Backend, family: Family, runner: Runner) -> Tools:
    """Return the commands named for the backend (iptables-nft-save), else the plain ones if they use it. Raises Missing."""
    program = _PROGRAM[family]
    for stem in (f"{program}-{backend.value}", program):
        main, save, restore = stem, f"{stem}-save", f"{stem}-restore"
        if all(map(runner.has, (main, save, restore))):
            kind, version = _identify(main, runner)
            if kind is backend:
                return Tools(backend, family, main, save, restore, version)
    raise Missing(f"{program}-{backend.value}-restore", PACKAGE)


def default_backend(runner: Runner) -> Backend | None:
    """Return the backend of the plain `iptables` command, None if it is not installed."""
    main = _PROGRAM[Family.IPV4]
    return _identify(main, runner)[0] if runner.has(main) else None


def _identify(command: str, runner: Runner) -> tuple[Backend, tuple[int, int, int]]:
    outcome = runner.run((command, "--version"), seconds=10)
    match = _VERSION.search(outcome.stdout)
    if match is None:
        raise Failed(f"{command} --version", outcome.exit_code, (outcome.stderr or outcome.stdout).strip())
    # Versions before 1.8 know only legacy, and print no backend.
    backend = Backend.NFT if match[4] == "nf_tables" else Backend.LEGACY
    return backend, (int(match[1]), int(match[2]), int(match[3]))


# How long legacy waits for its lock, and the interval of versions that poll for it.
LOCK_SECONDS = 5
_POLL_MICROSECONDS = 100_000


def lock_options(tools: Tools) -> tuple[str, ...]:
    """Return the options to wait for the lock. Only legacy has one; it waits since 1.6.2, by polling until 1.8.7."""
    if tools.backend is Backend.NFT or tools.version < (1, 6, 2):
        return ()
    if tools.version < (1, 8, 8):
        return ("-w", str(LOCK_SECONDS), "-W", str(_POLL_MICROSECONDS))
    return ("-w", str(LOCK_SECONDS))
