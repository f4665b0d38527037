"""Checks of kernel settings, other proxies and listeners; the value None means that a setting does not exist."""

from collections.abc import Mapping, Sequence

from pykubeproxy.inspect.preflight.report import Check, Finding
from pykubeproxy.kernel.processes import Listener, Process
from pykubeproxy.objects import Family
from pykubeproxy.wording import counted, listed, plural

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
