"""Checks of a node from itself: privileges, iptables, kernel, tables, settings, other proxies, and the API server.

The value None of a setting means that it does not exist. Another pod than the agent's has another account, and may have
another address of the API server: a problem there says nothing about the agent, so the check is skipped.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pykubeproxy.inspect.check.report import Check, Finding
from pykubeproxy.kernel.features import MissingFeature, Trial
from pykubeproxy.kernel.iptables import Backend, Tools
from pykubeproxy.kernel.leftovers import INTERFACE
from pykubeproxy.kernel.system import Listener, Process
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import BUILT_IN, KUBELET_HINTS, ChainKey
from pykubeproxy.wording import counted, listed, plural

# Only a check of the API server imports its client.
if TYPE_CHECKING:
    from pykubeproxy.sources.queries import ServerAccess

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
        advice = "Run this as root: `sudo pykubeproxy check`"
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


def features(trial: Trial, family: Family, primary: bool) -> Iterator[Finding]:
    """Check that kernel and iptables have the features that rules use."""
    check = Check("kernel", family)
    yield from (_missing(check, family, feature, primary) for feature in trial.missing)
    if trial.untested:
        message = f"features were looked up, not tried: no network namespace ({trial.untested})"
        yield check.skip(message, "Run with CAP_SYS_ADMIN to try them.")
    elif not trial.missing:
        yield check.ok("every feature that rules use was tried and works")


def _missing(check: Check, family: Family, feature: MissingFeature, primary: bool) -> Finding:
    message = f"{feature.name} cannot be used: {feature.reason}"
    load = f"Load {feature.modules or 'it'} with modprobe, or use a kernel and an iptables that have it"
    if feature.required and primary:
        return check.fail(message, f"{load}; the agent does not start without it.")
    if feature.required:
        return check.warn(message, f"{load}. Until then {family.value} is not served.")
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
    if left := sorted({key.chain for key in chains if key in skeleton.IPVS_CHAINS}):
        return LEFTOVERS.warn(
            f"chains of a kube-proxy in ipvs mode are left ({listed(left, 4)})",
            f"They do no harm without IPVS. {_REMOVE_LEFTOVERS}",
        )
    return LEFTOVERS.ok("no leftovers of other kube-proxy modes")


def _owned(chains: Chains) -> int:
    return sum(map(is_ours, chains))


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


Range = tuple[int, int]
"""The first and the last port."""

FORWARDING = {Family.IPV4: "net.ipv4.ip_forward", Family.IPV6: "net.ipv6.conf.all.forwarding"}
CALL_IPTABLES = {
    Family.IPV4: "net.bridge.bridge-nf-call-iptables",
    Family.IPV6: "net.bridge.bridge-nf-call-ip6tables",
}
_STRICT = "1"
_HIGH, _FULL = 0.8, 0.98
_OURS, _KUBE_PROXY = "pykubeproxy", "kube-proxy"
# The guides say it in the same words.
BOTH = (
    "Some seconds of both are fine: no connection fails. Permanently, they keep overwriting each other's rules, and"
    " changes wait longer."
)


def forwarding(family: Family, value: str | None, needed: bool) -> Finding:
    """Check that the node forwards packets; `needed` is False if it has no addresses of the family."""
    name, check = FORWARDING[family], Check("forwarding", family)
    if value not in (None, "0"):
        return check.ok(f"{family.value} packets are forwarded")
    if not needed:
        return check.ok(f"{family.value} packets are not forwarded, and the node does not use {family.value}")
    if value is None:
        message = f"the kernel has no {family.value} here ({name} is missing)"
        return check.fail(message, f"Enable {family.value} in the kernel, or run the cluster without it.")
    message = f"{family.value} packets are not forwarded ({name} = 0), so pods cannot be reached"
    return check.fail(message, f"Set {name} = 1.")


def reverse_path(effective: Mapping[str, str]) -> Finding:
    """Check the uplinks for strict source filtering, by interface; it is harmless on a single uplink."""
    check = Check("rp-filter")
    strict = sorted(name for name, value in effective.items() if value == _STRICT)
    if not strict:
        return check.ok("rp_filter is not strict on any uplink")
    if len(effective) == 1:
        return check.ok(f"rp_filter is strict on {strict[0]}, which is harmless on the only uplink")
    return check.warn(
        f"rp_filter is strict on {listed(strict, 4)}",
        "The kernel drops replies that arrive on another interface than the route back uses."
        " Set net.ipv4.conf.all.rp_filter = 2 (loose) if nodes have several paths.",
    )


def bridged(family: Family, bridges: Sequence[str], pods: str, value: str | None) -> Finding:
    """Check that iptables sees packets within a bridge; `pods` is the pod bridge that the flags name, or ""."""
    name, check = CALL_IPTABLES[family], Check("br-netfilter", family)
    if not bridges:
        return check.ok("there is no bridge")
    if value == "1":
        return check.ok(f"iptables sees packets within {listed(bridges, 4)}")
    cause, how = f"{name} = {value}", f"Set {name} = 1."
    if value is None:
        cause = "the module br_netfilter is not loaded"
        how = "Load br_netfilter with modprobe, and at each boot with /etc/modules-load.d."
    message = f"iptables does not see packets within a bridge ({cause})"
    if pods in bridges:
        return check.fail(message, f"Pods on {pods} cannot reach one another through a service. {how}")
    effect = f"If {listed(bridges, 4)} connects pods, they cannot reach one another through a service."
    return check.warn(message, f"{effect} {how}")


def connections(count: str | None, limit: str | None) -> Finding:
    """Check that the connection tracking table has free entries; when it is full, new connections are dropped."""
    check = Check("conntrack")
    if count is None or limit is None:
        message = "connections are not tracked yet (the module nf_conntrack is not loaded)"
        return check.skip(message, "The agent's rules load it.")
    used, most = int(count), int(limit)
    if not most:
        return check.ok(f"{counted(used, 'connection')} tracked, without a limit")
    share = used / most
    message = f"{counted(used, 'connection')} of {most} tracked ({100 * share:.0f}%)"
    if share < _HIGH:
        return check.ok(message)
    advice = f"Raise net.netfilter.nf_conntrack_max, or --conntrack-max-per-core, to {2 * most} in total."
    if share < _FULL:
        return check.warn(message, f"When the table is full, new connections are dropped. {advice}")
    return check.fail(message, f"The table is full: new connections are dropped. {advice}")


def node_ports(required: Range, local: str | None, reserved: str | None) -> Finding:
    """Check that the kernel does not give node ports to local connections.

    `local` and `reserved` are as in net.ipv4.ip_local_port_range ("32768 60999") and ip_local_reserved_ports
    ("30000-32767,40000").
    """
    check, span = Check("node-ports"), f"{required[0]}-{required[1]}"
    if local is None:
        return check.skip("the range of ephemeral ports is unknown (net.ipv4.ip_local_port_range)")
    first, last = map(int, local.split())
    begin, end = max(first, required[0]), min(last, required[1])
    if begin > end:
        return check.ok(f"node ports {span} do not overlap with ephemeral ports {first}-{last}")
    if not _uncovered(begin, end, reserved or ""):
        return check.ok(f"node ports {span} are reserved among ephemeral ports {first}-{last}")
    return check.warn(
        f"ephemeral ports {first}-{last} overlap with node ports {span}",
        "The kernel may give a local program the port of a Service. Set net.ipv4.ip_local_reserved_ports ="
        f" {f'{reserved},{span}' if reserved else span}, or move ip_local_port_range.",
    )


def _uncovered(begin: int, end: int, reserved: str) -> bool:
    """Return whether a port from begin to end is in none of the reserved ranges, which the kernel sorts."""
    for part in filter(None, reserved.split(",")):
        first, _, last = part.partition("-")
        if int(first) <= begin:
            begin = max(begin, int(last or first) + 1)
    return begin <= end


def is_agent(process: Process) -> bool:
    """Return whether a process is an agent, not another command of pykubeproxy or a wrapper."""
    words = process.arguments
    if "run" not in words:
        return False
    program, *before = words[: words.index("run")] or ("",)
    command = program.rpartition("/")[2]
    return command == _OURS or (command.startswith("python") and any(_OURS in word for word in before))


def flag_of(process: Process, name: str) -> str:
    """Return the value of a flag in a command line, "" without the flag."""
    for word, following in zip(process.arguments, (*process.arguments[1:], ""), strict=True):
        flag, equals, value = word.partition("=")
        if flag in (f"--{name}", f"-{name}"):
            return value if equals else following
    return ""


def proxies(running: Sequence[Process]) -> Finding:
    """Check that at most one service proxy writes rules in this network namespace: of several agents, only one does."""
    check = Check("proxies")
    agents = [process for process in running if is_agent(process)]
    others = [process for process in running if process.name == _KUBE_PROXY]
    if others and agents:
        message = f"{_KUBE_PROXY} ({_pids(others)}) and the agent ({_pids(agents)}) are both running"
        return check.fail(message, f"{BOTH} Stop one of them.")
    if others:
        return check.warn(
            f"{_KUBE_PROXY} is running ({_pids(others)})", f"Stop it when you start the agent. {BOTH}"
        )
    if len(agents) > 1:
        message = f"{len(agents)} agents are running ({_pids(agents)})"
        return check.warn(message, "One manages the rules; the others wait to take over when it ends.")
    if agents:
        return check.ok(f"the agent is running ({_pids(agents)})")
    return check.ok("no service proxy is running, or none is visible from here")


def ports(required: Mapping[str, int], listeners: Sequence[Listener]) -> tuple[Finding, ...]:
    """Check for each flag with a port that the port is free or the agent's."""
    return tuple(
        _port(flag, port, [listener for listener in listeners if listener.port == port])
        for flag, port in required.items()
    )


def _port(flag: str, port: int, listeners: Sequence[Listener]) -> Finding:
    check, elsewhere = Check("ports"), f"or set another port with --{flag}"
    if not listeners:
        return check.ok(f"port {port} is free")
    holders = [listener.process for listener in listeners if listener.process]
    others = [process for process in holders if not is_agent(process)]
    if others and all(process.name == _KUBE_PROXY for process in others):
        return check.warn(f"kube-proxy uses port {port}", "The port is free once kube-proxy has stopped.")
    if others:
        names = listed(sorted({f"{process.name} (process {process.pid})" for process in others}), 4)
        return check.fail(f"port {port} is in use by {names}", f"Stop it, {elsewhere}.")
    if holders:
        return check.ok(f"the agent uses port {port}")
    message = f"a process that is not visible from here uses port {port}"
    return check.warn(message, f"Unless it is the agent, stop it, {elsewhere}.")


def _pids(processes: Sequence[Process]) -> str:
    pids = listed((str(process.pid) for process in processes), 4)
    return f"{plural(len(processes), 'process')} {pids}"


_API, _NODE, _RIGHTS = Check("api-server"), Check("node"), Check("permissions")
_IN_ITS_POD = "Once the agent runs, run `pykubeproxy check` in its pod."


def api_server(
    access: "ServerAccess", node_name: str, as_agent: bool = True, by_service: bool = False
) -> tuple[Finding, ...]:
    """Return the findings about an API server.

    - `as_agent`: the agent uses this address and account
    - `by_service`: the address is that of the Service `kubernetes`
    """
    return (
        _answer(access, as_agent, by_service),
        _node_object(access, node_name, as_agent),
        _permissions(access, as_agent),
    )


def unusable_server(reason: str, as_agent: bool = True) -> tuple[Finding, ...]:
    """Return the findings if the settings for the API server cannot be used."""
    if not as_agent:
        return (_API.skip(reason, _IN_ITS_POD), *_skipped("no usable API server is configured here"))
    advice = "Check --kubeconfig and --master, or the file of --config."
    return (_API.fail(reason, advice), *_skipped("no usable API server is configured"))


def no_server() -> tuple[Finding, ...]:
    """Return the findings if no API server is configured and this is no pod."""
    reason = "no API server is configured"
    advice = f"Pass the agent's --kubeconfig or --config to check it. {_IN_ITS_POD}"
    return (_API.skip(reason, advice), *_skipped(reason))


def _skipped(reason: str) -> tuple[Finding, ...]:
    return _NODE.skip(reason), _RIGHTS.skip(reason)


def _answer(access: "ServerAccess", as_agent: bool, by_service: bool) -> Finding:
    if access.answers and as_agent and by_service:
        advice = (
            "A node that has just started has no rules for that Service, so its agent cannot start. In"
            " api-server.env, set the address of the control plane or its load balancer."
        )
        return _API.warn(f"{access.server} answers, but is the address of the Service kubernetes", advice)
    if access.answers and access.verified:
        return _API.ok(f"{access.server} answers")
    if access.answers:
        advice = (
            "A machine in between can read the credentials and change the rules. In the kubeconfig, set"
            " certificate-authority instead of insecure-skip-tls-verify."
        )
        return _API.warn(f"{access.server} answers, but its certificate is not verified", advice)
    if not as_agent:
        return _API.skip(access.node_error, f"The agent may use another address. {_IN_ITS_POD}")
    return _API.fail(access.node_error, f"Try it from this node: curl -k {access.server}/livez")


def _node_object(access: "ServerAccess", node_name: str, as_agent: bool) -> Finding:
    if access.node_error:
        return _NODE.skip(f"cannot look up Node {node_name}")
    if access.node:
        return _NODE.ok(f"the cluster has a Node {node_name}")
    message = f"the cluster has no Node {node_name}"
    if not as_agent:
        return _NODE.skip(message, "This pod may have another host name. Pass --hostname-override.")
    advice = "Set the name the cluster uses with --hostname-override; kubectl get nodes lists the names."
    return _NODE.fail(message, advice)


def _permissions(access: "ServerAccess", as_agent: bool) -> Finding:
    from pykubeproxy.sources.queries import EVENTS

    if access.review_error:
        return _RIGHTS.skip(f"unknown: {access.review_error}")
    if not as_agent:
        lacking = f"lacks {listed(map(str, access.denied), 6)}" if access.denied else "has all permissions"
        return _RIGHTS.skip(f"this pod's account, which is not the agent's, {lacking}", _IN_ITS_POD)
    needed = [str(right) for right in access.denied if right != EVENTS]
    if needed:
        advice = "Bind the account to the ClusterRole system:node-proxier, or grant these permissions."
        return _RIGHTS.fail(f"not granted: {listed(needed, 6)}", advice)
    if EVENTS in access.denied:
        advice = (
            "The proxy works, but its events are lost. Grant the permission, as system:node-proxier does."
        )
        return _RIGHTS.warn(f"not granted: {EVENTS}.{EVENTS.group}", advice)
    return _RIGHTS.ok("the proxy has all permissions")
