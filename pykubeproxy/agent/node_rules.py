"""Rules of the node that belong to no Service: the guard of loopback addresses, and what other proxies have left.

With route_localnet, the kernel accepts packets to 127.0.0.0/8 from the node's network (CVE-2020-8558). So the setting
must never be in force without the rule in KUBE-FIREWALL that drops them.

Another proxy, or this agent with the other iptables backend, may have left rules beside ours. Packets meet both. Rules
that nobody updates send new connections to endpoints that are gone.
"""

from collections.abc import Callable
from pathlib import Path

import structlog

from pykubeproxy.agent.limiter import MAX_PERIOD, backoff
from pykubeproxy.agent.node_setup import KernelSetting, apply_setting
from pykubeproxy.config import Config
from pykubeproxy.kernel import (
    Backend,
    KernelError,
    Runner,
    Tables,
    leftovers,
    open_iptables,
    other_backend_with_chain,
)
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import node_port_networks
from pykubeproxy.rules.dispatch import serves_loopback
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.plan import NFT_CHAINS_PER_BLOCK
from pykubeproxy.rules.removal import removal
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.text import block, join

_ROUTE_LOCALNET = KernelSetting("proc/sys/net/ipv4/conf/all/route_localnet", 1)
# Stands for the node's own address, which is no loopback address.
_ANOTHER_ADDRESS = "0.0.0.1"
_INPUT = ChainKey("filter", "INPUT")
_JUMP = skeleton.JUMPS[_INPUT][0]

log = structlog.get_logger()


def serves_node_ports(config: Config) -> bool:
    """Return whether node ports are served on 127.0.0.1, which needs route_localnet."""
    return config.iptables.localhost_node_ports and serves_loopback(
        node_port_networks(config, _ANOTHER_ADDRESS, Family.IPV4)
    )


def guard_loopback(config: Config, tables: Tables) -> bool:
    """Write the guard to the IPv4 tables if it is missing and node ports are served on 127.0.0.1; log a failure.

    Return whether such node ports are guarded.
    """
    if not serves_node_ports(config):
        return False
    try:
        tables.restore(_missing_guard(tables))
    except KernelError as error:
        log.warning("loopback guard failed", error=str(error), effect="route_localnet not set yet")
        return False
    return True


def route_loopback(config: Config, root: Path = Path("/")) -> None:
    """Set route_localnet if node ports are served on 127.0.0.1. Call it only once the guard is in place."""
    if serves_node_ports(config):
        apply_setting(_ROUTE_LOCALNET, root)


def set_up_loopback(config: Config, backend: Backend) -> None:
    """Write the guard, then set route_localnet; log a failure. For the init container: the agent may lack the privilege."""
    try:
        if guard_loopback(config, open_iptables(backend, Family.IPV4)):
            route_loopback(config)
    except KernelError as error:
        log.warning("loopback guard failed", error=str(error), effect="route_localnet not set")


def _missing_guard(tables: Tables) -> str:
    """Return the restore input that adds what is missing: KUBE-FIREWALL, its rule, and the jump to it in INPUT."""
    firewall = skeleton.KUBELET_FIREWALL
    exists = tables.has_chain(firewall)
    guard = [("-A", firewall, rule) for rule in skeleton.kubelet_firewall(RuleOptions(Family.IPV4))]
    lines = [
        f"{command} {key.chain} {rule}"
        for command, key, rule in (*guard, ("-I", _INPUT, _JUMP))
        if not (exists and tables.has_rule(key, rule))
    ]
    return block(firewall.table, join(lines if exists else [f"-N {firewall.chain}", *lines]))


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
