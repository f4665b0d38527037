"""Remove the rules that another proxy, or this agent with the other iptables backend, has left beside ours.

Packets meet both. Rules that nobody updates send new connections to endpoints that are gone.
"""

from collections.abc import Callable

import structlog

from pykubeproxy.agent.loopback import serves_node_ports
from pykubeproxy.agent.sync.limiter import MAX_PERIOD, backoff
from pykubeproxy.config import Config
from pykubeproxy.kernel import (
    Backend,
    KernelError,
    Runner,
    leftovers,
    open_iptables,
    other_backend_with_chain,
)
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.blocks import NFT_CHAINS_PER_BLOCK
from pykubeproxy.rules.removal import removal

log = structlog.get_logger()


class LeftoverSchedule:
    """Schedule the checks for leftovers. It reads no clock: the caller passes the time in, in seconds.

    A proxy that ends late may have written its rules again, so check again after 1, 2, 4, … seconds, up to `period`.
    If every check finds rules, a second proxy keeps running: wait longer, up to an hour.
    """

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self._checks = self._found = 0
        self.due = now

    def checked(self, found: bool, now: float) -> None:
        """Record a check, and whether it found leftovers."""
        self._checks += 1
        self._found = self._found + 1 if found else 0
        pause = backoff(self._checks, self._period)
        self.due = now + (max(pause, backoff(self._found, MAX_PERIOD)) if self._found else pause)


def remove_leftovers(config: Config, backend: Backend, progress: Callable[[], None]) -> bool:
    """Remove leftovers; call once our rules are in place, in this backend. Return whether there were any."""
    tables = [_remove_nftables_mode(family) for family in Family]
    other = other_backend_with_chain(backend, skeleton.NAT_SERVICES, Runner(progress=progress))
    if other:
        for family in Family:
            _remove_chains(config, other, family, progress)
    return any(tables) or other is not None


def _remove_nftables_mode(family: Family) -> bool:
    try:
        found = leftovers.remove_nftables_table(family)
    except OSError as error:
        log.warning("kube-proxy nftables table not checked", family=family.value, error=error.strerror)
        return False
    if found:
        log.info("kube-proxy nftables table removed", family=family.value)
    return found


def _remove_chains(config: Config, other: Backend, family: Family, progress: Callable[[], None]) -> None:
    where = {"backend": other.value, "family": family.value}
    try:
        iptables = open_iptables(other, family, Runner(progress=progress))
        if not iptables.has_chain(skeleton.NAT_SERVICES):
            return
        # With node ports on 127.0.0.1, the backend in use guards loopback addresses.
        found = removal(iptables.save(), loopback_guarded=serves_node_ports(config))
        iptables.restore(found.restore_input(NFT_CHAINS_PER_BLOCK if other is Backend.NFT else None))
    except KernelError as error:
        log.warning("rules in the other iptables backend not removed", **where, error=str(error))
    else:
        log.warning("rules in the other iptables backend removed", **where, chains=len(found.deleted))
