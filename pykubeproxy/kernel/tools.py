"""The two kinds of iptables, and which commands of which version speak to them."""

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
    """Where the rules live: in nftables, or in the older xtables."""

    NFT = "nft"
    LEGACY = "legacy"


class Tools(msgspec.Struct, frozen=True):
    """The commands that speak to one backend for one family, and their version such as (1, 8, 9)."""

    backend: Backend
    family: Family
    main: str
    save: str
    restore: str
    version: tuple[int, int, int]


def find_tools(backend: Backend, family: Family, runner: Runner) -> Tools:
    """The commands by their full names (iptables-nft-save), or the plain ones where those are of this
    backend.

    Raises Missing, naming what to install.
    """
    program = _PROGRAM[family]
    for stem in (f"{program}-{backend.value}", program):
        main, save, restore = stem, f"{stem}-save", f"{stem}-restore"
        if all(map(runner.has, (main, save, restore))):
            kind, version = _identify(main, runner)
            if kind is backend:
                return Tools(backend, family, main, save, restore, version)
    raise Missing(f"{program}-{backend.value}-restore", PACKAGE)


def system_default(runner: Runner) -> Backend | None:
    """The backend of the plain `iptables` command, None where there is no such command."""
    main = _PROGRAM[Family.IPV4]
    return _identify(main, runner)[0] if runner.has(main) else None


def _identify(command: str, runner: Runner) -> tuple[Backend, tuple[int, int, int]]:
    outcome = runner.run((command, "--version"), seconds=10)
    match = _VERSION.search(outcome.stdout)
    if match is None:
        raise Failed(f"{command} --version", outcome.exit_code, (outcome.stderr or outcome.stdout).strip())
    # Before 1.8 there was one kind only, and it did not say which.
    backend = Backend.NFT if match[4] == "nf_tables" else Backend.LEGACY
    return backend, (int(match[1]), int(match[2]), int(match[3]))
