"""Choose between iptables-nft and iptables-legacy."""

from collections.abc import Iterable
from typing import Literal

from pykubeproxy.kernel import nftables
from pykubeproxy.kernel.errors import KernelError, Missing
from pykubeproxy.kernel.iptables import Iptables, open_iptables
from pykubeproxy.kernel.legacy import entries
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.kernel.tools import PACKAGE, Backend, default_backend
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import KUBELET_HINTS, ChainKey

# With more entries, iptables-legacy takes 0.1 s or more to look up a chain.
_LARGE = 5000
_ALL_TABLES = ("raw", "mangle", "nat", "filter", "security")


def choose_backend(
    setting: Literal["auto", "nft", "legacy"], runner: Runner | None = None, holding: ChainKey | None = None
) -> Backend:
    """Return the configured backend; for `auto`, the one this node uses. Changes no table. Raises Missing.

    `auto` prefers the backend with the kubelet's hint chain, then the one with more rules, then that of the plain
    iptables command. Read-only callers may pass `holding`: if only one backend has this chain, it comes first. A large
    legacy table counts as having the chain.
    """
    runner = runner or Runner()
    if setting != "auto":
        if not _installed(Backend(setting), runner):
            raise Missing(f"iptables-{setting}-restore", PACKAGE)
        return Backend(setting)
    installed = {backend: opened for backend in Backend if (opened := _installed(backend, runner))}
    if not installed:
        raise Missing("iptables-restore", PACKAGE)
    if len(installed) == 1:
        return next(iter(installed))
    signs = [lambda iptables: _has_any((iptables,), KUBELET_HINTS), _may_have_rules]
    if holding:
        signs.insert(0, lambda iptables: _has_or_is_large(iptables, holding))
    for has_sign in signs:
        matching = [backend for backend, families in installed.items() if any(map(has_sign, families))]
        if len(matching) == 1:
            return matching[0]
    rules = {backend: sum(map(_count_rules, families)) for backend, families in installed.items()}
    if rules[Backend.NFT] != rules[Backend.LEGACY]:
        return max(rules, key=lambda backend: rules[backend])
    return default_backend(runner) or Backend.NFT


def other_backend_with_chain(used: Backend, chain: ChainKey, runner: Runner | None = None) -> Backend | None:
    """Return the other backend if either family has a chain in it too: packets then pass the rules of both.

    None if the other backend cannot be read. Changes no table.
    """
    (other,) = (backend for backend in Backend if backend is not used)
    return other if _has_any(_installed(other, runner or Runner()), (chain,)) else None


def _installed(backend: Backend, runner: Runner) -> list[Iptables]:
    """Return the families of a backend whose commands are installed."""
    opened = []
    for family in Family:
        try:
            opened.append(open_iptables(backend, family, runner))
        except Missing:
            continue
    return opened


def _has_or_is_large(iptables: Iptables, chain: ChainKey) -> bool:
    # The kernel reports the size for this namespace only.
    measurable = iptables.backend is Backend.LEGACY and not iptables.runner.prefix
    return (measurable and entries(iptables.family, chain.table) >= _LARGE) or _has_any((iptables,), (chain,))


def _may_have_rules(iptables: Iptables) -> bool:
    """Return whether tables have rules, or may have them: unlike counting, this reads no large table."""
    if iptables.runner.prefix:  # netlink and getsockopt see this namespace only
        return True
    family = iptables.family
    if iptables.backend is Backend.LEGACY:
        size = sum(entries(family, table) for table in _ALL_TABLES)
        # An empty chain has entries too.
        return size >= _LARGE or (size > 0 and _count_rules(iptables) > 0)
    try:
        return any(nftables.has_rules(family, table) for table in _ALL_TABLES)
    except OSError:
        return True


def _has_any(families: Iterable[Iptables], chains: Iterable[ChainKey]) -> bool:
    """Return whether a family has one of the chains; one that this kernel cannot read has none."""
    for iptables in families:
        for chain in chains:
            try:
                if iptables.has_chain(chain):
                    return True
            except KernelError:
                continue
    return False


def _count_rules(iptables: Iptables) -> int:
    try:
        return len(iptables.save())
    except KernelError:
        return 0
