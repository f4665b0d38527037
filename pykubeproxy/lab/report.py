"""The output of the lab's commands: text in 80 columns, and JSON documents of version pykubeproxy/v1."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pykubeproxy import API_VERSION
from pykubeproxy.lab.agents import AgentEnded
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.scenarios import Scenario, ScenarioFailed
from pykubeproxy.wording import styled, wrapped

MARGIN = 7
LABEL = 15

Document = dict[str, Any]
Write = Callable[[str], None]


@dataclass(frozen=True)
class ScenarioResult:
    """The result of a scenario: its log entries, and why it failed or None."""

    name: str
    title: str
    ok: bool
    seconds: float
    log: tuple[tuple[str, str], ...]
    failure: str | None = None


def run_scenario(lab: Lab, scenario: Scenario, number: str, write: Write) -> ScenarioResult:
    """Reset the lab, run a scenario and write its log. Any exception counts as a failure of the scenario."""
    write("")
    write(styled(f"{number:>{MARGIN - 2}}  {scenario.title}", bold=True))
    write(_entry("", scenario.description, 0))
    started = time.monotonic()
    entries: list[tuple[str, str]] = []

    def log(label: str, text: object) -> None:
        entries.append((label, str(text)))
        write(_entry(label, str(text)))

    failure = None
    try:
        lab.reset()
        scenario.run(lab, log)
    except Exception as error:  # the other scenarios run anyway
        expected = isinstance(error, ScenarioFailed | AgentEnded | TimeoutError)
        failure = str(error) if expected else repr(error)
    seconds = round(time.monotonic() - started, 3)
    if failure is None:
        write(_entry("why", scenario.why))
        write(_entry("inspect", scenario.command))
        write(_entry("ok", f"{seconds:.1f} s", color="green"))
    else:
        write(_entry("FAILED", failure, color="red"))
        write(_entry("logs", f"in {lab.logs}; use --keep to keep them"))
    return ScenarioResult(scenario.name, scenario.title, failure is None, seconds, tuple(entries), failure)


def _entry(label: str, text: str, width: int = LABEL, color: str = "") -> str:
    """Return a text in its column, with a label of this width to its left."""
    start, indent = f"{'':{MARGIN}}{label:{width}}", " " * (MARGIN + width)
    lines = "\n".join(wrapped(text, start, indent))
    return lines.replace(label, styled(label, color), 1) if color else lines


def introduction(lab: Lab) -> str:
    """Describe the lab before the first scenario."""
    hosts = "two nodes, their pods and an outside client as network namespaces"
    agents = f"an agent on each node (iptables backend: {lab.backend})"
    return "\n".join(wrapped(f"Lab {lab.name}: {hosts}, an API server, and {agents}."))


def summary(results: Sequence[ScenarioResult], seconds: float) -> str:
    """Return the last lines of a demo."""
    failed = [result.name for result in results if not result.ok]
    if not failed:
        return f"{len(results)} of {len(results)} scenarios passed in {seconds:.0f} s."
    text = f"{len(failed)} of {len(results)} scenarios failed in {seconds:.0f} s: {', '.join(failed)}"
    return "\n".join(wrapped(text))


def demo_document(lab: str, backend: str, results: Sequence[ScenarioResult], seconds: float) -> Document:
    """Return the results of scenarios.

    {"apiVersion", "lab", "backend", "ok": whether all scenarios passed, "seconds",
     "scenarios": [{"name", "title", "ok", "seconds", "log": [{"label", "text"}], "failure": or null}]}
    """
    return {
        "apiVersion": API_VERSION,
        "lab": lab,
        "backend": backend,
        "ok": all(result.ok for result in results),
        "seconds": round(seconds, 3),
        "scenarios": [
            {**asdict(result), "log": [{"label": label, "text": text} for label, text in result.log]}
            for result in results
        ],
    }


def list_document(scenarios: Iterable[Scenario]) -> Document:
    """Return the available scenarios.

    {"apiVersion", "scenarios": [{"name", "title", "description", "why", "command"}]}
    """
    keys = ("name", "title", "description", "why", "command")
    return {
        "apiVersion": API_VERSION,
        "scenarios": [{key: getattr(scenario, key) for key in keys} for scenario in scenarios],
    }


def status_document(state: Mapping[str, Any], services: Iterable[Object]) -> Document:
    """Return a running lab, from its driver's state and its API server's Services.

    {"apiVersion", "lab", "logs": a directory, "api": the API server's URL,
     "hosts": [{"name", "kind": "fabric", "node", "outside" or "pod", "addresses": [IPv4, IPv6],
       "node": of a pod, or null, "state": of a pod, such as "ready", or null,
       "agent": the pid of a node's agent, or null}],
     "services": [{"namespace", "name", "clusterIPs", "ports": [{"port", "protocol", "nodePort": or null}]}]}
    """
    return {
        "apiVersion": API_VERSION,
        **{key: state[key] for key in ("lab", "logs", "api")},
        "hosts": [
            {"node": None, "state": None, **host, "agent": _running(host.get("agent"))}
            for host in state["hosts"]
        ],
        "services": [
            {
                "namespace": service["metadata"]["namespace"],
                "name": service["metadata"]["name"],
                "clusterIPs": service["spec"]["clusterIPs"],
                "ports": [
                    {"port": port["port"], "protocol": port["protocol"], "nodePort": port.get("nodePort")}
                    for port in service["spec"]["ports"]
                ],
            }
            for service in services
        ],
    }


def _running(pid: int | None) -> int | None:
    """Return the pid of a process that runs, None for a zombie or none."""
    return pid if pid and Path(f"/proc/{pid}/exe").exists() else None


def down_document(lab: str, existed: bool) -> Document:
    """Return whether a lab was removed.

    {"apiVersion", "lab", "removed": whether there was one}
    """
    return {"apiVersion": API_VERSION, "lab": lab, "removed": existed}


def status_text(status: Document) -> str:
    """Return a status document as tables."""
    hosts = [("HOST", "NODE", "IPV4", "IPV6", "STATE")]
    for host in status["hosts"]:
        state = host["state"] or ""
        if host["kind"] == "fabric":
            state = f"API server {status['api']}"
        if host["kind"] == "node":
            state = f"agent running, pid {host['agent']}" if host["agent"] else "agent stopped"
        hosts.append((host["name"], host["node"] or "", *host["addresses"], state))
    services = [("SERVICE", "CLUSTER IPS", "PORT", "NODE PORT")]
    for service in status["services"]:
        for port in service["ports"]:
            name, ips = f"{service['namespace']}/{service['name']}", ", ".join(service["clusterIPs"])
            services.append((name, ips, f"{port['port']}/{port['protocol']}", str(port["nodePort"] or "")))
    head = f"Lab {status['lab']}, logs in {status['logs']}"
    return "\n".join([head, "", *_table(hosts), "", *_table(services)])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
