"""Checks of other processes: proxies, and listeners on the agent's ports."""

from collections.abc import Mapping, Sequence

from pykubeproxy.inspect.preflight.model import Finding, fail, ok, warn
from pykubeproxy.kernel.processes import Listener, Process
from pykubeproxy.wording import listed, plural

_OURS, _KUBE_PROXY = "pykubeproxy", "kube-proxy"


def is_agent(process: Process) -> bool:
    """Return whether a process is an agent, not another command of pykubeproxy or a wrapper."""
    words = process.arguments
    if "run" not in words:
        return False
    program, *before = words[: words.index("run")] or ("",)
    command = program.rpartition("/")[2]
    return command == _OURS or (command.startswith("python") and any(_OURS in word for word in before))


def proxies(running: Sequence[Process]) -> Finding:
    """Check that at most one service proxy runs in this network namespace."""
    agents = [process for process in running if is_agent(process)]
    others = [process for process in running if process.name == _KUBE_PROXY]
    if others and agents:
        message = f"{_KUBE_PROXY} ({_pids(others)}) and the agent ({_pids(agents)}) are both running"
        return fail("proxies", message, "They undo each other's rules. Stop one of them.")
    if others:
        advice = "Stop it before you start the agent."
        return warn("proxies", f"{_KUBE_PROXY} is running ({_pids(others)})", advice)
    if len(agents) > 1:
        message = f"{len(agents)} agents are running ({_pids(agents)})"
        return fail("proxies", message, "They undo each other's rules. Stop all but one.")
    if agents:
        return ok("proxies", f"the agent is running ({_pids(agents)})")
    return ok("proxies", "no service proxy is running, or none is visible from here")


def ports(required: Mapping[str, int], listeners: Sequence[Listener]) -> tuple[Finding, ...]:
    """Check for each flag with a port that the port is free or the agent's."""
    return tuple(
        _port(flag, port, [listener for listener in listeners if listener.port == port])
        for flag, port in required.items()
    )


def _port(flag: str, port: int, listeners: Sequence[Listener]) -> Finding:
    check, elsewhere = "ports", f"or set another port with --{flag}"
    if not listeners:
        return ok(check, f"port {port} is free")
    holders = [listener.process for listener in listeners if listener.process]
    others = [process for process in holders if not is_agent(process)]
    if others and all(process.name == _KUBE_PROXY for process in others):
        return warn(check, f"kube-proxy uses port {port}", "The port is free once kube-proxy has stopped.")
    if others:
        names = listed(sorted({f"{process.name} (process {process.pid})" for process in others}), 4)
        return fail(check, f"{names} uses port {port}", f"Stop it, {elsewhere}.")
    if holders:
        return ok(check, f"the agent uses port {port}")
    message = f"a process that is not visible from here uses port {port}"
    return warn(check, message, f"Unless it is the agent, stop it, {elsewhere}.")


def _pids(processes: Sequence[Process]) -> str:
    pids = listed((str(process.pid) for process in processes), 4)
    return f"{plural(len(processes), 'process')} {pids}"
