"""How the lab tells what it does: eighty columns, one scenario below the other."""

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pykubeproxy.lab.agents import AgentEnded
from pykubeproxy.lab.api import Object
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import FABRIC
from pykubeproxy.lab.scenarios import Scenario, ScenarioFailed

WIDTH = 80
MARGIN = 7
LABEL = 15

Write = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What a scenario saw, each with a few words before it; `failure` is what was not as it should be, or ""."""

    name: str
    title: str
    seconds: float
    seen: tuple[tuple[str, str], ...]
    failure: str = ""

    @property
    def well(self) -> bool:
        """Whether all was as it should be."""
        return not self.failure


def run_scenario(lab: Lab, scenario: Scenario, number: str, write: Write) -> Result:
    """Run one scenario in the emptied lab and tell it as it goes.

    What goes wrong outside of the scenario's own checks counts as a failure of the scenario.
    """
    write("")
    write(click.style(f"{number:>{MARGIN - 2}}  {scenario.title}", bold=True))
    _entry(write, "", scenario.does)
    started = time.monotonic()
    told: list[tuple[str, str]] = []

    def say(label: str, seen: object) -> None:
        told.append((label, str(seen)))
        _entry(write, label or " ", str(seen))

    def result(failure: str = "") -> Result:
        return Result(scenario.name, scenario.title, time.monotonic() - started, tuple(told), failure)

    try:
        lab.reset()
        scenario.run(lab, say)
    except Exception as failure:  # whatever it is, the other scenarios go on
        known = isinstance(failure, ScenarioFailed | AgentEnded | TimeoutError)
        reason = str(failure) if known else repr(failure)
        _entry(write, "FAILED", reason, colour="red")
        _entry(write, "logs", f"with --keep they stay readable in {lab.logs}")
        return result(reason)
    _entry(write, "why", scenario.why)
    _entry(write, "look", scenario.look)
    ended = result()
    _entry(write, "ok", f"{ended.seconds:.1f} s", colour="green")
    return ended


def _entry(write: Write, label: str, text: str, colour: str | None = None) -> None:
    """A label and a text beside it, as many lines as it takes; without a label the text begins further left."""
    lead = " " * MARGIN
    beside = " " * (MARGIN + LABEL) if label else lead
    lines = textwrap.wrap(text, WIDTH - len(beside), break_on_hyphens=False) or [""]
    first = (
        f"{lead}{click.style(label, fg=colour) if colour else label}{'':{LABEL - len(label)}}"
        if label
        else lead
    )
    write(f"{first}{lines[0]}")
    for line in lines[1:]:
        write(f"{beside}{line}")


def summary(results: Sequence[Result], seconds: float) -> str:
    """The last line, or lines."""
    failed = [it.name for it in results if not it.well]
    if not failed:
        well = "As it should be" if len(results) == 1 else f"All {len(results)} scenarios as they should be"
        return f"{well}, {seconds:.0f} s in all."
    return textwrap.fill(
        f"{len(failed)} of {len(results)} scenarios failed: {', '.join(failed)} ({seconds:.0f} s in all).",
        WIDTH,
        break_on_hyphens=False,
    )


def agent_runs(pid: int | None) -> bool:
    """Whether an agent's process is there; one that only waits to be reaped is not."""
    return Path(f"/proc/{pid}/exe").exists()


def opening(lab: Lab) -> str:
    """What is there, before the first scenario."""
    return textwrap.fill(
        f"Lab {lab.name}: two nodes, their pods and an outside client as network namespaces, an API "
        f"server, and on each node an agent (iptables backend: {lab.backend}).",
        WIDTH,
    )


def overview(state: Mapping[str, Any], services: Sequence[Object], logs: str) -> str:
    """A standing lab at a glance, from what its driver wrote and what its API server has."""
    places = [("fabric", "", *FABRIC, f"API server {state['api']}")]
    for name, node in state["nodes"].items():
        pid = node["agent"]
        agent = f"agent running, pid {pid}" if agent_runs(pid) else "agent stopped"
        places.append((name, "", *node["addresses"], agent))
    places.append(("client", "", *state["client"]["addresses"], ""))
    for name, pod in state["pods"].items():
        places.append((name, pod["node"], *pod["addresses"], pod["state"]))
    lines = [f"Lab {state['name']}, logs in {logs}", ""]
    lines += _columns([("PLACE", "NODE", "IPV4", "IPV6", "STATE"), *places])
    frontends = [("SERVICE", "CLUSTER IPS", "PORT", "NODE PORT")]
    for service in services:
        metadata, spec = service["metadata"], service["spec"]
        frontends += [
            (
                f"{metadata['namespace']}/{metadata['name']}",
                ", ".join(spec["clusterIPs"]),
                f"{port['port']}/{port['protocol']}",
                str(port.get("nodePort", "")),
            )
            for port in spec["ports"]
        ]
    return "\n".join([*lines, "", *_columns(frontends)])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
