"""What is in the tables already: ours or another proxy's, in the backend in use and in the other one."""

from collections.abc import Iterable

from pykubeproxy.inspect.preflight.finding import Finding, fail, number, ok, several, skip, warn
from pykubeproxy.kernel.tools import Backend
from pykubeproxy.objects import Family
from pykubeproxy.rules import ownership
from pykubeproxy.rules.ruleset import BUILT_IN, ChainKey

Chains = dict[ChainKey, int]
"""Chains, each with the number of its rules."""

# Chains that kube-proxy keeps in ipvs mode, and no other.
_IPVS_MODE = frozenset(
    (
        "KUBE-LOAD-BALANCER",
        "KUBE-NODE-PORT",
        "KUBE-SOURCE-RANGES-FIREWALL",
        "KUBE-IPVS-FILTER",
        "KUBE-IPVS-OUT-FILTER",
    )
)
_LEFTOVERS = "leftovers"
_CLEAN_UP = "take them out with `pykubeproxy cleanup`"


def in_use(backend: Backend, family: Family, chains: Chains) -> Finding:
    """The tables that the proxy writes, or will write."""
    owned = [key for key in chains if ownership.is_ours(key)]
    where = f"{backend.value} is used"
    if not owned:
        return ok("tables", f"{where}, and holds no rules of a service proxy yet", family)
    return ok("tables", f"{where}, with {number(len(owned), 'chain')} of a service proxy", family)


def not_in_use(backend: Backend, family: Family, chains: Chains) -> Finding:
    """The tables of the other backend: whatever they hold, packets meet it too."""
    other = Backend.LEGACY if backend is Backend.NFT else Backend.NFT
    owned = [key for key in chains if ownership.is_ours(key)]
    if owned:
        text = f"{backend.value}, not in use, has {number(len(owned), 'chain')} of a service proxy too"
        advice = (
            f"Packets meet both. If {other.value} is right, stop whatever writes {backend.value} rules, {_CLEAN_UP}"
            " while no proxy runs, and start it again; else say which with --iptables-backend."
        )
        return fail("other-tables", text, advice, family)
    foreign = sorted({key.chain for key, rules in chains.items() if rules or key.chain not in BUILT_IN})
    kubelets = [name for name in foreign if name.startswith("KUBE-")]
    if kubelets:
        text = f"the kubelet writes to {backend.value}, which is not in use ({several(kubelets)})"
        advice = f"Give --iptables-backend {backend.value}, so that both write to the same tables."
        return warn("other-tables", text, advice, family)
    if foreign:
        text = f"{backend.value}, not in use, has rules of others ({several(foreign)})"
        advice = f"Packets meet them too. Have their owner use {other.value}, if that can be had."
        return warn("other-tables", text, advice, family)
    return ok("other-tables", f"nothing is in the {backend.value} tables, which are not in use", family)


def unreadable(backend: Backend, family: Family, reason: str) -> Finding:
    """The tables in use could not be read, which the agent has to do first of all."""
    advice = "The agent reads them when it starts. See to what stands in the way."
    return fail("tables", f"the {backend.value} tables cannot be read: {reason}", advice, family)


def not_read(check: str, backend: Backend, family: Family, reason: str) -> Finding:
    """Tables that could not be looked at, which does not tell against the node."""
    return skip(check, f"the {backend.value} tables could not be read: {reason}", family=family)


def other_modes_unknown(reason: str) -> Finding:
    """It could not be told whether something is left."""
    return skip(_LEFTOVERS, f"other modes of kube-proxy could not be looked for: {reason}")


def other_modes(
    nftables: Iterable[Family], ipvs_services: int, ipvs_interface: bool, chains: Iterable[ChainKey]
) -> Finding:
    """What a kube-proxy in nftables or ipvs mode has left, or is keeping up.

    `nftables` are the families with a table kube-proxy, `ipvs_services` how many addresses IPVS serves, and
    `ipvs_interface` is whether there is a kube-ipvs0.
    """
    tables = [f"{'ip' if family is Family.IPV4 else 'ip6'} kube-proxy" for family in nftables]
    if ipvs_services:
        text = f"IPVS, the kernel's other load balancer, has {number(ipvs_services, 'virtual service')}"
        advice = (
            "They win over iptables. Restart the node, or run `ipvsadm --clear` if no one else uses IPVS. "
            "(`kube-proxy --cleanup` does it too, but takes out all rules of services as well.)"
        )
        return fail(_LEFTOVERS, text, advice)
    if ipvs_interface:
        text = "the interface kube-ipvs0 of a kube-proxy in ipvs mode is there"
        advice = "It makes service addresses the node's own. Remove it: ip link delete kube-ipvs0"
        return fail(_LEFTOVERS, text, advice)
    if tables:
        text = f"a kube-proxy in nftables mode has the nftables {'tables' if tables[1:] else 'table'} {several(tables)}"
        advice = "If it runs no more: the agent removes them when it starts."
        return warn(_LEFTOVERS, text, advice)
    left = sorted({key.chain for key in chains} & _IPVS_MODE)
    if left:
        advice = "They do no harm without IPVS; `kube-proxy --cleanup` removes them."
        return warn(_LEFTOVERS, f"chains of a kube-proxy in ipvs mode are left ({several(left)})", advice)
    return ok(_LEFTOVERS, "nothing is left of other modes of kube-proxy")
