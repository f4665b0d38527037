"""The kernel modules that the rules of a backend need, loaded ahead.

The kernel loads most by itself when they are first asked for. It does not do so for the legacy tables' own: those only
iptables-legacy asks modprobe for, which takes CAP_SYS_MODULE; and on some nodes the kernel is given no modprobe at all.
"""

import platform
from pathlib import Path

from pykubeproxy.kernel.errors import Failed, KernelError
from pykubeproxy.kernel.features import rule_modules
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.kernel.tools import Backend
from pykubeproxy.objects import Family

_TABLES = ("filter", "nat", "mangle")
_SECONDS = 30


def modules(backend: Backend) -> tuple[str, ...]:
    """The names of all modules that rules in a backend may need, for both families."""
    if backend is Backend.NFT:
        own: tuple[str, ...] = ("nf_tables", "nft_compat", "nft_chain_nat")
    else:
        own = tuple(f"{ip}_tables" for ip in ("ip", "ip6"))
        own += tuple(f"{ip}table_{table}" for ip in ("ip", "ip6") for table in _TABLES)
    used = (module for family in Family for module in rule_modules(family))
    return (*own, "nf_conntrack", *dict.fromkeys(used))


def load_modules(backend: Backend, runner: Runner | None = None, root: Path = Path("/")) -> str:
    """Have modprobe load what a backend's rules need; returns what it complained of, "" if of nothing.

    A complaint need not mean anything: kernels have some of them built in or under another name. Nothing is done where
    there is no modprobe, or no modules for the running kernel.
    """
    runner = runner or Runner()
    if not runner.has("modprobe") or not (root / "lib/modules" / platform.release()).is_dir():
        return ""
    try:
        # --all: one that cannot be had does not keep the others out.
        outcome = runner.run(("modprobe", "--all", *modules(backend)), seconds=_SECONDS)
    except KernelError as error:
        return str(error)
    complaint = Failed("modprobe", outcome.exit_code, outcome.stderr.strip())
    return str(complaint) if outcome.exit_code else ""
