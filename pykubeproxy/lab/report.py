"""The reports of the lab's commands, and the log of a demonstration while it runs."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pykubeproxy.lab.agents import AgentEnded
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.machine import RunDirectory
from pykubeproxy.lab.scenarios import Scenario, ScenarioFailed
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import GAP, Block, Row, Sentence, Table
from pykubeproxy.wording import duration, styled, wrapped

MARGIN = 7
LABEL = 15

Write = Callable[[str], None]


class LogEntry(msgspec.Struct, frozen=True):
    """What a scenario observed.

    - `label`: of what, "" if the entry before says so
    - `text`: what it observed
    """

    label: str
    text: str


class ScenarioResult(msgspec.Struct, frozen=True):
    """How a scenario ended.

    - `title`: what it shows
    - `ok`: it passed
    - `seconds`: how long it took
    - `log`: what it observed
    - `failure`: why it failed, or null
    """

    name: str
    title: str
    ok: bool
    seconds: float
    log: tuple[LogEntry, ...]
    failure: str | None = None


def run_scenario(lab: Lab, scenario: Scenario, number: str, write: Write) -> ScenarioResult:
    """Reset the lab, run a scenario and write its log. Any exception counts as a failure of the scenario."""
    write("")
    write(styled(f"{number:>{MARGIN - 2}}  {scenario.title}", bold=True))
    write(_entry("", scenario.description, 0))
    started = time.monotonic()
    entries: list[LogEntry] = []

    def log(label: str, text: object) -> None:
        entries.append(LogEntry(label, str(text)))
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
    return "\n".join(wrapped(f'Lab "{lab.name}": {hosts}, an API server, and {agents}.'))


def summary(results: Sequence[ScenarioResult], seconds: float) -> str:
    """Return the last lines of a demo."""
    failed = [result.name for result in results if not result.ok]
    if not failed:
        return f"{len(results)} of {len(results)} scenarios passed in {seconds:.0f} s."
    text = f"{len(failed)} of {len(results)} scenarios failed in {seconds:.0f} s: {', '.join(failed)}"
    return "\n".join(wrapped(text))


class DemoReport(Report, frozen=True, kw_only=True):
    """The results of scenarios.

    - `lab`: the lab's name
    - `backend`: the iptables backend of the agents: "auto", "nft" or "legacy"
    - `ok`: all scenarios passed
    - `seconds`: how long all of them took
    """

    lab: str
    backend: str
    ok: bool
    seconds: float
    scenarios: tuple[ScenarioResult, ...]

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return the last lines of the demonstration, which prints the others while it runs.

        `wide` adds a table of its scenarios.
        """
        if wide:
            rows = [
                Row((one.name, "passed" if one.ok else "failed", duration(one.seconds)))
                for one in self.scenarios
            ]
            yield Table(rows, ("SCENARIO", "RESULT", "DURATION"), frozenset({2}))
            yield GAP
        yield Sentence(summary(self.scenarios, self.seconds))

    def names(self) -> Iterator[str]:
        """Return the scenarios that passed."""
        return (result.name for result in self.scenarios if result.ok)


class OfferedScenario(msgspec.Struct, frozen=True):
    """A scenario that `lab demo` can run.

    - `title`: what it shows
    - `description`: what happens in it
    - `why`: the rule behind the result
    - `command`: a command that shows it on a node
    """

    name: str
    title: str
    description: str
    why: str
    command: str


class ScenariosReport(Report, frozen=True, kw_only=True):
    """The scenarios of `lab demo`, in their order."""

    scenarios: tuple[OfferedScenario, ...]

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return a line for each scenario; `wide` adds what happens."""
        header = ("SCENARIO", "TITLE", *(["DESCRIPTION"] if wide else []))
        rows = [Row((one.name, one.title, *([one.description] if wide else []))) for one in self.scenarios]
        yield Table(rows, header)

    def names(self) -> Iterator[str]:
        """Return the names of the scenarios."""
        return (one.name for one in self.scenarios)


def scenarios_report(scenarios: Iterable[Scenario]) -> ScenariosReport:
    """Return the available scenarios."""
    return ScenariosReport(
        scenarios=tuple(
            OfferedScenario(one.name, one.title, one.description, one.why, one.command) for one in scenarios
        )
    )


class HostState(msgspec.Struct, frozen=True):
    """A network namespace of a lab.

    - `kind`: "fabric", "node", "outside" or "pod"
    - `addresses`: IPv4 and IPv6
    - `node`: of a pod, or null
    - `state`: of a pod, such as "ready", or null
    - `agent`: the process id of a node's service proxy, or null
    - `proxy`: "agent" or "kube-proxy" on a node, or null
    """

    name: str
    kind: str
    addresses: tuple[str, ...]
    node: str | None = None
    state: str | None = None
    agent: int | None = None
    proxy: str | None = None


class LabPort(msgspec.Struct, frozen=True, rename="camel"):
    """A port of a Service.

    - `node_port`: null without one
    """

    port: int
    protocol: str
    node_port: int | None


class ServiceState(msgspec.Struct, frozen=True, rename="camel"):
    """A Service of a lab.

    - `cluster_ips`: of each family, the primary one first
    """

    namespace: str
    name: str
    cluster_ips: tuple[str, ...]
    ports: tuple[LabPort, ...]


class LabReport(Report, frozen=True, kw_only=True):
    """A running lab.

    - `lab`: its name
    - `logs`: the folder of its logs
    - `api`: the URL of its API server
    """

    lab: str
    logs: str
    api: str
    hosts: tuple[HostState, ...]
    services: tuple[ServiceState, ...]

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return hosts and Services as tables; `wide` adds the kinds of hosts."""
        yield Sentence(f'Lab "{self.lab}", logs in {self.logs}')
        yield GAP
        hosts = [
            Row((one.name, *([one.kind] if wide else []), one.node or "", *one.addresses, self._state(one)))
            for one in self.hosts
        ]
        yield Table(hosts, ("HOST", *(["KIND"] if wide else []), "NODE", "IPV4", "IPV6", "STATE"))
        yield GAP
        services = [
            Row(
                (
                    f"{service.namespace}/{service.name}",
                    ", ".join(service.cluster_ips),
                    f"{port.port}/{port.protocol}",
                    str(port.node_port or ""),
                )
            )
            for service in self.services
            for port in service.ports
        ]
        if services:
            yield Table(services, ("SERVICE", "CLUSTER IPS", "PORT", "NODE PORT"))

    def names(self) -> Iterator[str]:
        """Return the names of the hosts."""
        return (host.name for host in self.hosts)

    def _state(self, host: HostState) -> str:
        match host.kind:
            case "fabric":
                return f"API server {self.api}"
            case "node":
                return (
                    f"{host.proxy} running, pid {host.agent}"
                    if host.agent
                    else f"the lab's {host.proxy} stopped"
                )
            case _:
                return host.state or ""


def lab_report(state: Mapping[str, Any], services: Iterable[Object]) -> LabReport:
    """Return the report of a lab from its driver's state and its API server's Services."""
    hosts = (msgspec.convert(host, HostState) for host in state["hosts"])
    return LabReport(
        lab=state["lab"],
        logs=state["logs"],
        api=state["api"],
        hosts=tuple(msgspec.structs.replace(host, agent=_running(host.agent)) for host in hosts),
        services=tuple(
            ServiceState(
                service["metadata"]["namespace"],
                service["metadata"]["name"],
                tuple(service["spec"].get("clusterIPs") or ()),
                tuple(
                    LabPort(port["port"], port["protocol"], port.get("nodePort"))
                    for port in service["spec"].get("ports") or ()
                ),
            )
            for service in services
        ),
    )


def _running(pid: int | None) -> int | None:
    """Return the pid of a process that runs, None for a zombie or none."""
    return pid if pid and Path(f"/proc/{pid}/exe").exists() else None


class RunningLab(msgspec.Struct, frozen=True):
    """A lab that runs.

    - `driver`: the process id of `lab up` or `lab demo`; null while the lab starts
    - `pods`: the number of its pods
    - `logs`: the folder of its logs
    """

    name: str
    driver: int | None
    pods: int
    logs: str


class LabsReport(Report, frozen=True, kw_only=True):
    """The labs that run on this machine."""

    labs: tuple[RunningLab, ...]

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return a line for each lab; `wide` adds the folder of its logs."""
        rows = [
            Row((lab.name, str(lab.driver or ""), str(lab.pods), *([lab.logs] if wide else [])))
            for lab in self.labs
        ]
        header = ("LAB", "DRIVER", "PODS", *(["LOGS"] if wide else []))
        yield Table(rows, header, right=frozenset({1, 2})) if rows else Sentence("No lab is running.")

    def names(self) -> Iterator[str]:
        """Return the names of the labs."""
        return (lab.name for lab in self.labs)


def labs_report(directories: Iterable[RunDirectory]) -> LabsReport:
    """Return the report of running labs."""
    states = ((directory, directory.read_state()) for directory in directories)
    return LabsReport(
        labs=tuple(
            RunningLab(
                directory.lab,
                state.get("driver"),
                sum(host["kind"] == "pod" for host in state.get("hosts", ())),
                str(directory.logs),
            )
            for directory, state in states
        )
    )
