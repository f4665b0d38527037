"""Serve node ports on 127.0.0.1: first guard loopback addresses against other hosts, then let the kernel route to them.

With route_localnet, the kernel accepts packets to 127.0.0.0/8 from the node's network (CVE-2020-8558). So the setting
must never be in force without the rule in KUBE-FIREWALL that drops them.
"""

from pathlib import Path

import structlog

from pykubeproxy.agent.node_setup import KernelSetting, apply_setting
from pykubeproxy.config import Config
from pykubeproxy.kernel import Backend, KernelError, Tables, open_iptables
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import node_port_networks
from pykubeproxy.rules.dispatch import serves_loopback
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.restore_text import block, join
from pykubeproxy.rules.ruleset import ChainKey

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
