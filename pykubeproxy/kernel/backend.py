"""Which of the two backends to use."""

from typing import Literal

from pykubeproxy.kernel.errors import KernelError, Missing
from pykubeproxy.kernel.iptables import Iptables, open_iptables
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.kernel.tools import PACKAGE, Backend, system_default
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import Ruleset

# Chains that the kubelet keeps in mangle for others to tell its backend by (KEP-3178).
HINTS = frozenset({"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"})


def choose(wanted: Literal["auto", "nft", "legacy"], runner: Runner | None = None) -> Backend:
    """The backend that was asked for or, for `auto`, the one this node already uses.

    That is the one with the kubelet's hint chain, else the one with more rules, else the plain iptables
    command's. Neither backend is changed by looking, not even legacy, which creates tables when asked for
    them. Raises Missing when the commands of the backend that was asked for, or of both, are not installed.
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
    hinted = [backend for backend, families in present.items() if any(map(_has_hint, families))]
    if len(hinted) == 1:
        return hinted[0]
    rules = {backend: sum(map(_rules, families)) for backend, families in present.items()}
    if rules[Backend.NFT] != rules[Backend.LEGACY]:
        return max(rules, key=lambda backend: rules[backend])
    return system_default(runner) or Backend.NFT


def _installed(backend: Backend, runner: Runner) -> list[Iptables]:
    found = []
    for family in Family:
        try:
            found.append(open_iptables(backend, family, runner))
        except Missing:
            continue
    return found


def _live(iptables: Iptables, tables: tuple[str, ...] | None) -> Ruleset:
    """The live tables; none for a family or backend that this kernel lacks: nobody's rules can be there."""
    try:
        return iptables.save(tables)
    except KernelError:
        return Ruleset(iptables.family, {})


def _has_hint(iptables: Iptables) -> bool:
    return any(key.chain in HINTS for key in _live(iptables, ("mangle",)).chains)


def _rules(iptables: Iptables) -> int:
    return len(_live(iptables, None))
