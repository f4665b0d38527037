"""Which of the two backends to use."""

from collections.abc import Iterable
from typing import Literal

from pykubeproxy.kernel.errors import KernelError, Missing
from pykubeproxy.kernel.iptables import Iptables, open_iptables
from pykubeproxy.kernel.legacy import entries
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.kernel.tools import PACKAGE, Backend, system_default
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey

# From so many entries on it takes iptables-legacy tenths of a second to look for a chain.
_LARGE = 5000
# Chains that the kubelet keeps in mangle for others to tell its backend by (KEP-3178).
HINTS = (ChainKey("mangle", "KUBE-IPTABLES-HINT"), ChainKey("mangle", "KUBE-KUBELET-CANARY"))


def choose(
    wanted: Literal["auto", "nft", "legacy"], runner: Runner | None = None, holding: ChainKey | None = None
) -> Backend:
    """The backend that was asked for or, for `auto`, the one this node already uses.

    That is the one with the kubelet's hint chain, else the one with more rules, else the plain iptables
    command's. Who only wants to look may give a chain that is `holding` what is looked for: the one backend that has it
    comes first, which is found out quickly, for a large table of legacy is taken to have it. Neither backend is changed
    by looking, not even legacy, which creates tables when asked for them. Raises Missing when the commands of the
    backend that was asked for, or of both, are not installed.
    """
    runner = runner or Runner()
    if wanted != "auto":
        open_iptables(Backend(wanted), Family.IPV4, runner)
        return Backend(wanted)
    present = {backend: opened for backend in Backend if (opened := _installed(backend, runner))}
    if not present:
        raise Missing("iptables-restore", PACKAGE)
    if len(present) == 1:
        return next(iter(present))
    if holding:
        holders = [
            backend for backend, families in present.items() if any(_holds(it, holding) for it in families)
        ]
        if len(holders) == 1:
            return holders[0]
    marked = [backend for backend, families in present.items() if _has_any(families, HINTS)]
    if len(marked) == 1:
        return marked[0]
    rules = {backend: sum(map(_rules, families)) for backend, families in present.items()}
    if rules[Backend.NFT] != rules[Backend.LEGACY]:
        return max(rules, key=lambda backend: rules[backend])
    return system_default(runner) or Backend.NFT


def also_holding(used: Backend, chain: ChainKey, runner: Runner | None = None) -> Backend | None:
    """The other backend, if that has a chain too in either family: packets meet the rules of both.

    None also where it cannot be looked at. Nothing is changed by looking.
    """
    runner = runner or Runner()
    (other,) = (backend for backend in Backend if backend is not used)
    return other if any(_has(it, chain) for it in _installed(other, runner)) else None


def _installed(backend: Backend, runner: Runner) -> list[Iptables]:
    found = []
    for family in Family:
        try:
            found.append(open_iptables(backend, family, runner))
        except Missing:
            continue
    return found


def _holds(iptables: Iptables, chain: ChainKey) -> bool:
    """Whether a chain is there, or its table is so large that looking would take long."""
    here = iptables.backend is Backend.LEGACY and not iptables.runner.prefix
    return (here and entries(iptables.family, chain.table) >= _LARGE) or _has(iptables, chain)


def _has_any(families: Iterable[Iptables], signs: Iterable[ChainKey]) -> bool:
    return any(_has(iptables, sign) for iptables in families for sign in signs)


def _has(iptables: Iptables, sign: ChainKey) -> bool:
    # A family or backend that this kernel lacks holds nobody's rules.
    try:
        return iptables.has_chain(sign)
    except KernelError:
        return False


def _rules(iptables: Iptables) -> int:
    try:
        return len(iptables.save())
    except KernelError:
        return 0
