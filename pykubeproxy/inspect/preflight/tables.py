"""Checks of the tables in both backends: rules of ours, of another proxy, of others."""

from collections.abc import Iterable

from pykubeproxy.inspect.preflight.model import Finding, fail, ok, skip, warn
from pykubeproxy.kernel.tools import Backend
from pykubeproxy.objects import Family
from pykubeproxy.rules import ownership
from pykubeproxy.rules.ruleset import BUILT_IN, ChainKey
from pykubeproxy.wording import counted, listed, plural

Chains = dict[ChainKey, int]
"""Chains with the number of their rules."""

# Chains that kube-proxy has in ipvs mode only.
_IPVS_MODE = frozenset(
    f"KUBE-{name}"
    for name in ("LOAD-BALANCER", "NODE-PORT", "SOURCE-RANGES-FIREWALL", "IPVS-FILTER", "IPVS-OUT-FILTER")
)
_LEFTOVERS = "leftovers"


def in_use(backend: Backend, family: Family, chains: Chains) -> Finding:
    """Report the tables that the proxy writes."""
    owned = [key for key in chains if ownership.is_ours(key)]
    where = f"{backend.value} is used"
    if not owned:
        return ok("tables", f"{where}, without rules of a service proxy yet", family)
    return ok("tables", f"{where}, with {counted(len(owned), 'chain')} of a service proxy", family)


def not_in_use(backend: Backend, family: Family, chains: Chains) -> Finding:
    """Check the tables of the other backend, which packets pass too."""
    other = Backend.LEGACY if backend is Backend.NFT else Backend.NFT
    owned = [key for key in chains if ownership.is_ours(key)]
    if owned:
        message = f"{backend.value}, not in use, has {counted(len(owned), 'chain')} of a service proxy too"
        advice = (
            f"Packets pass both. If {other.value} is right, stop the proxy that writes {backend.value} rules, run"
            " `pykubeproxy cleanup` while no proxy runs, and start it again. Else set --iptables-backend."
        )
        return fail("other-tables", message, advice, family)
    foreign = sorted({key.chain for key, rules in chains.items() if rules or key.chain not in BUILT_IN})
    kubelets = [name for name in foreign if name.startswith("KUBE-")]
    if kubelets:
        message = f"the kubelet writes to {backend.value}, which is not in use ({listed(kubelets, 4)})"
        advice = f"Set --iptables-backend {backend.value}, so that both write to the same tables."
        return warn("other-tables", message, advice, family)
    if foreign:
        message = f"{backend.value}, not in use, has rules of others ({listed(foreign, 4)})"
        advice = f"Packets pass them too. If possible, make their owner use {other.value}."
        return warn("other-tables", message, advice, family)
    return ok("other-tables", f"the {backend.value} tables, which are not in use, are empty", family)


def unreadable(backend: Backend, family: Family, reason: str) -> Finding:
    """Report that the tables in use cannot be read."""
    advice = "The agent reads them when it starts. Fix the cause first."
    return fail("tables", f"the {backend.value} tables cannot be read: {reason}", advice, family)


def not_read(check: str, backend: Backend, family: Family, reason: str) -> Finding:
    """Report tables that could not be read, through no fault of the node."""
    return skip(check, f"the {backend.value} tables could not be read: {reason}", family=family)


def other_modes_unknown(reason: str) -> Finding:
    """Report that leftovers of other modes could not be looked for."""
    return skip(_LEFTOVERS, f"could not look for leftovers of other modes of kube-proxy: {reason}")


def other_modes(
    nftables: Iterable[Family], ipvs_services: int, ipvs_interface: bool, chains: Iterable[ChainKey]
) -> Finding:
    """Check for leftovers of a kube-proxy in nftables or ipvs mode.

    `nftables` are the families with a table kube-proxy; `ipvs_services` is the number of IPVS addresses;
    `ipvs_interface` tells whether kube-ipvs0 exists.
    """
    tables = [f"{'ip' if family is Family.IPV4 else 'ip6'} kube-proxy" for family in nftables]
    if ipvs_services:
        message = f"IPVS, the kernel's other load balancer, has {counted(ipvs_services, 'virtual service')}"
        advice = (
            "They take precedence over iptables. Restart the node, or run `ipvsadm --clear` if nothing else uses IPVS."
            " (`kube-proxy --cleanup` does it too, but also removes all rules of services.)"
        )
        return fail(_LEFTOVERS, message, advice)
    if ipvs_interface:
        message = "the interface kube-ipvs0 of a kube-proxy in ipvs mode exists"
        advice = "It makes service addresses the node's own. Remove it: ip link delete kube-ipvs0"
        return fail(_LEFTOVERS, message, advice)
    if tables:
        message = (
            f"a kube-proxy in nftables mode has the nftables {plural(len(tables), 'table')} {listed(tables)}"
        )
        advice = "If it no longer runs: the agent removes them when it starts."
        return warn(_LEFTOVERS, message, advice)
    left = sorted({key.chain for key in chains} & _IPVS_MODE)
    if left:
        advice = "They do no harm without IPVS; `kube-proxy --cleanup` removes them."
        return warn(_LEFTOVERS, f"chains of a kube-proxy in ipvs mode are left ({listed(left, 4)})", advice)
    return ok(_LEFTOVERS, "other modes of kube-proxy have left nothing")
