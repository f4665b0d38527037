"""Who else is on the node: other proxies, and programs on the ports that the agent wants."""

from collections.abc import Mapping, Sequence

from pykubeproxy.inspect.preflight.finding import Finding, fail, ok, several, warn
from pykubeproxy.kernel.processes import Listener, Process

_OURS, _KUBE_PROXY = "pykubeproxy", "kube-proxy"


def is_agent(process: Process) -> bool:
    """Whether a process is an agent of this program, rather than another of its commands, or what started it."""
    words = process.arguments
    if "run" not in words:
        return False
    program, *before = words[: words.index("run")] or ("",)
    command = program.rpartition("/")[2]
    return command == _OURS or (command.startswith("python") and any(_OURS in word for word in before))


def proxies(running: Sequence[Process]) -> Finding:
    """Whether at most one service proxy runs in this network namespace."""
    agents = [process for process in running if is_agent(process)]
    others = [process for process in running if process.name == _KUBE_PROXY]
    if others and agents:
        text = f"{_KUBE_PROXY} ({_numbers(others)}) runs beside the agent ({_numbers(agents)})"
        return fail("proxies", text, "Two proxies undo each other's rules: stop one of them.")
    if others:
        advice = "That is as it should be before it is replaced: stop it before the agent starts."
        return warn("proxies", f"{_KUBE_PROXY} is running ({_numbers(others)})", advice)
    if len(agents) > 1:
        text = f"{len(agents)} agents are running ({_numbers(agents)})"
        return fail("proxies", text, "They undo each other's rules: keep one.")
    if agents:
        return ok("proxies", f"the agent is running ({_numbers(agents)})")
    return ok("proxies", "no service proxy is running that can be seen from here")


def ports(wanted: Mapping[str, int], taken: Sequence[Listener]) -> tuple[Finding, ...]:
    """For each flag with the port it asks for, whether the port is free, or the agent's already."""
    return tuple(_port(flag, port, [it for it in taken if it.port == port]) for flag, port in wanted.items())


def _port(flag: str, port: int, taken: Sequence[Listener]) -> Finding:
    check, elsewhere = "ports", f"or give another port with --{flag}"
    if not taken:
        return ok(check, f"port {port} is free")
    holders = [it.process for it in taken if it.process]
    others = [process for process in holders if not is_agent(process)]
    if others and all(process.name == _KUBE_PROXY for process in others):
        return warn(check, f"port {port} is kube-proxy's", "It will be free when kube-proxy is stopped.")
    if others:
        who = several(sorted({f"{process.name} (process {process.pid})" for process in others}))
        return fail(check, f"port {port} is taken by {who}", f"Stop that, {elsewhere}.")
    if holders:
        return ok(check, f"port {port} is the agent's")
    text = f"port {port} is taken by a process that cannot be seen from here"
    return warn(check, text, f"If it is not the agent itself, stop it, {elsewhere}.")


def _numbers(processes: Sequence[Process]) -> str:
    noun = "processes" if len(processes) > 1 else "process"
    return f"{noun} {several(str(process.pid) for process in processes)}"
