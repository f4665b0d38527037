"""Checks of privileges, iptables, kernel features, and the tables of both backends."""

from collections.abc import Collection, Iterable, Iterator

from pykubeproxy.inspect.preflight.report import Check, Finding
from pykubeproxy.kernel.ipvs_mode import INTERFACE
from pykubeproxy.kernel.tools import Backend, Tools
from pykubeproxy.kernel.trial import MissingFeature, Trial
from pykubeproxy.objects import Family
from pykubeproxy.rules import ipvs_mode, skeleton
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import BUILT_IN, KUBELET_HINTS, ChainKey
from pykubeproxy.wording import counted, listed, plural

LEFTOVERS = Check("leftovers")
Chains = dict[ChainKey, int]
"""Chains with the number of their rules."""

_CAPABILITIES = ("CAP_NET_ADMIN", "CAP_NET_RAW")
# The first with --random-fully, whose iptables-restore waits for the lock.
_OLDEST = (1, 6, 2)
# Older ones list rules in another form than they were written (kubernetes#82361), so -C does not find them.
_OLDEST_NFT = (1, 8, 4)
_REMOVE_LEFTOVERS = "Stop every proxy on this node and run `pykubeproxy cleanup --all-modes`, which removes all rules of services too."


def privileges(
    capabilities: frozenset[str], of_agent: frozenset[str] | None = None, in_pod: bool = False
) -> Finding:
    """Check the privileges to change iptables: of the agent, if it runs, with the capabilities `of_agent`.

    `capabilities` are those of this process. Without them, checks that read tables or try features are skipped.
    """
    check = Check("privileges")
    if of_agent is not None and (missing := _lacking(of_agent)):
        advice = f"Grant it {missing}: in a pod, in the securityContext of its container."
        return check.fail(f"the agent lacks {missing}", advice)
    if missing := _lacking(capabilities):
        advice = "Run this as root"
        if in_pod:
            advice = "Run this in a debug pod with `kubectl debug --profile sysadmin`"
        return check.skip(f"this process lacks {missing}", f"{advice}. The agent needs them too.")
    return check.ok(f"{listed(_CAPABILITIES)} are in effect")


def _lacking(capabilities: frozenset[str]) -> str:
    return listed(name for name in _CAPABILITIES if name not in capabilities)


def no_tools(reason: str, family: Family | None = None, primary: bool = True) -> Finding:
    """Report commands that are missing."""
    check, advice = Check("iptables", family), "Install them on the PATH of the agent."
    if primary or not family:
        return check.fail(reason, advice)
    return check.warn(reason, f"{advice} Until then {family.value} is not served.")


def ipv6_disabled(reason: str, primary: bool, used: bool) -> Finding:
    """Report that the node has no IPv6; `used` tells whether the cluster has addresses of it."""
    check = Check("kernel", Family.IPV6)
    if primary:
        return check.fail(reason, "Enable IPv6: it is the first address family of this node.")
    if used:
        return check.warn(reason, "Enable IPv6. Until then it is not served.")
    return check.ok(f"{reason}, and the node does not use it: the agent serves IPv4 only")


def missing_network(reason: str) -> Finding:
    """Report that the configured networks are of another family than the node's."""
    return Check("networks").fail(
        reason, "The agent does not start. Add a network, or support both families."
    )


def version(tools: Tools) -> Finding:
    """Check that a backend's commands are recent enough."""
    check, message = Check("iptables", tools.family), f"{tools.main} {_dotted(tools.version)}"
    if tools.version < _OLDEST:
        return check.fail(message, f"Install iptables {_dotted(_OLDEST)} or later.")
    if tools.backend is Backend.NFT and tools.version < _OLDEST_NFT:
        reason = "Up to 1.8.3 the nft backend misreads its own rules."
        return check.warn(message, f"{reason} Install {_dotted(_OLDEST_NFT)} or later.")
    return check.ok(message)


def unavailable(reason: str, family: Family, primary: bool) -> Finding:
    """Report that the kernel cannot serve a family."""
    check, advice = Check("kernel", family), "Load them with modprobe, or use a kernel that has them."
    if primary:
        return check.fail(reason, advice)
    return check.warn(reason, f"{advice} Until then {family.value} is not served.")


def features(trial: Trial, family: Family) -> Iterator[Finding]:
    """Check that kernel and iptables have the features that rules use."""
    check = Check("kernel", family)
    yield from (_missing(check, feature) for feature in trial.missing)
    if trial.untested:
        message = f"features were looked up, not tried: no network namespace ({trial.untested})"
        yield check.skip(message, "Run with CAP_SYS_ADMIN to try them.")
    elif not trial.missing:
        yield check.ok("every feature that rules use was tried and works")


def _missing(check: Check, feature: MissingFeature) -> Finding:
    message = f"{feature.name} cannot be used: {feature.reason}"
    load = f"Load {feature.modules or 'it'} with modprobe, or use a kernel and an iptables that have it"
    if feature.required:
        return check.fail(message, f"{load}; the agent does not start without it.")
    return check.warn(message, f"The agent runs without it. {load}.")


def in_use(backend: Backend, family: Family, chains: Chains) -> Finding:
    """Report the tables that the proxy writes."""
    check, used = Check("tables", family), f"{backend.value} is used"
    if owned := _owned(chains):
        return check.ok(f"{used}, with {counted(owned, 'chain')} of a service proxy")
    return check.ok(f"{used}, without rules of a service proxy yet")


def not_in_use(backend: Backend, family: Family, chains: Chains) -> Finding:
    """Check the tables of the other backend, which packets pass too."""
    check = Check("other-tables", family)
    used = Backend.LEGACY if backend is Backend.NFT else Backend.NFT
    if owned := _owned(chains):
        return check.fail(
            f"{backend.value}, not in use, has {counted(owned, 'chain')} of a service proxy too",
            f"Packets pass both. If {used.value} is right, stop the proxy that writes {backend.value} rules if it still"
            " runs; the agent removes them after its first sync. Else set --iptables-backend.",
        )
    if hints := sorted({key.chain for key in KUBELET_HINTS if key in chains}):
        message = f"the kubelet writes to {backend.value}, which is not in use ({listed(hints)})"
        advice = f"Set --iptables-backend {backend.value}, so that both write to the same tables."
        return check.warn(message, advice)
    if skeleton.KUBELET_FIREWALL in chains:
        message = f"{backend.value}, not in use, has a chain KUBE-FIREWALL that a service proxy left"
        return check.warn(message, "Run `pykubeproxy cleanup` while no proxy runs.")
    foreign = sorted({key.chain for key, rules in chains.items() if rules or key.chain not in BUILT_IN})
    if foreign:
        message = f"{backend.value}, not in use, has rules of other programs ({listed(foreign, 4)})"
        return check.warn(message, f"Packets pass them too. If possible, make their owner use {used.value}.")
    return check.ok(f"the {backend.value} tables, which are not in use, are empty")


def other_modes(
    nftables: Collection[str], virtual_servers: int, interface: bool, chains: Iterable[ChainKey]
) -> Finding:
    """Check for leftovers of a kube-proxy in nftables or ipvs mode.

    `nftables` are its tables; `virtual_servers` is their number; `interface` tells whether kube-ipvs0 exists.
    """
    if virtual_servers:
        return LEFTOVERS.fail(
            f"a kube-proxy in ipvs mode has {counted(virtual_servers, 'virtual server')} of IPVS",
            f"They take precedence over iptables. {_REMOVE_LEFTOVERS}",
        )
    if interface:
        return LEFTOVERS.fail(
            f"the interface {INTERFACE} of a kube-proxy in ipvs mode exists",
            f"It makes service addresses the node's own. {_REMOVE_LEFTOVERS}",
        )
    if nftables:
        return LEFTOVERS.warn(
            f"a kube-proxy in nftables mode has the nftables {plural(len(nftables), 'table')} {listed(nftables)}",
            "Stop that kube-proxy if it still runs. The agent removes its tables after the first sync.",
        )
    if left := sorted({key.chain for key in chains if key in ipvs_mode.CHAINS}):
        return LEFTOVERS.warn(
            f"chains of a kube-proxy in ipvs mode are left ({listed(left, 4)})",
            f"They do no harm without IPVS. {_REMOVE_LEFTOVERS}",
        )
    return LEFTOVERS.ok("no leftovers of other kube-proxy modes")


def _owned(chains: Chains) -> int:
    return sum(map(is_ours, chains))


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
