"""The output of `lab demo`, and the texts of the scenarios."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import click
import pytest

from pykubeproxy.lab import report
from pykubeproxy.lab.apiserver.patches import merged
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.scenarios import SCENARIOS, Log, Scenario, ScenarioFailed
from pykubeproxy.lab.scenarios.scenario import Run
from pykubeproxy.report.text import text
from pykubeproxy.wording import WIDTH

LAB = cast("Lab", SimpleNamespace(reset=lambda: None, logs=Path("/run/lab/logs")))


def output(run: Callable[[Lab, Log], None]) -> tuple[report.ScenarioResult, list[str]]:
    """The result of a scenario and the lines written."""

    def function(context: Run) -> None:
        run(context.lab, context.log)

    lines: list[str] = []
    scenario = Scenario("x", "A title", "What happens.", "The reason. " * 8, "a command", function)
    result = report.run_scenario(LAB, scenario, "1/1", lines.append)
    return result, [click.unstyle(line) for line in "\n".join(lines).splitlines()]


def test_log_of_a_scenario_fits_80_columns() -> None:
    """The output has title, observations, reason and command within 80 columns."""

    def run(_lab: Lab, log: Log) -> None:
        log("3 pods", "600 connections: " + ", ".join(f"web-{number} 200" for number in range(12)))

    result, lines = output(run)
    assert result.ok
    assert result.log[0].label == "3 pods"
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert "A title" in text
    assert "3 pods" in text
    assert "web-11 200" in text
    assert "a command" in text


@pytest.mark.parametrize(
    "failure", [ScenarioFailed("expected a; seen: b"), TimeoutError("still not: c"), KeyError("oops")]
)
def test_exception_fails_the_scenario(failure: Exception) -> None:
    """Any exception is a failed scenario with its reason, not the end of the demo."""

    def run(_lab: Lab, _log: Log) -> None:
        raise failure

    result, lines = output(run)
    assert not result.ok
    assert result.failure and str(failure.args[0]) in result.failure
    assert any("FAILED" in line and str(failure.args[0]) in line for line in lines)


def result(name: str, failure: str | None = None) -> report.ScenarioResult:
    log = (report.LogEntry("1 pod", "all connections"),)
    return report.ScenarioResult(name, f"Title of {name}", failure is None, 1.25, log, failure)


def test_summary_names_failed_scenarios() -> None:
    """The summary counts and names failed scenarios within 80 columns."""
    assert "2 of 2 scenarios passed" in report.summary([result("a"), result("b")], 1.0)
    assert "1 of 2 scenarios failed in 1 s: b" in report.summary([result("a"), result("b", "oh")], 1.0)
    all_failed = report.summary([result(scenario.name, "oh") for scenario in SCENARIOS], 100.0)
    assert max(map(len, all_failed.splitlines())) <= WIDTH


def test_wide_adds_the_kinds_of_hosts_and_the_time_of_scenarios() -> None:
    host = report.HostState("node1", "node", ("10.0.0.11", "fd00:10::11"), agent=7, proxy="agent")
    other = report.HostState("node2", "node", ("10.0.0.12", "fd00:10::12"), proxy="kube-proxy")
    lab = report.LabReport(
        lab="lab", logs="/run/lab/logs", api="http://10.0.0.1:6443", hosts=(host, other), services=()
    )
    lines = [line.split() for line in text(lab.blocks(wide=True)).splitlines()]
    assert lines[2:5] == [
        ["HOST", "KIND", "NODE", "IPV4", "IPV6", "STATE"],
        ["node1", "node", "10.0.0.11", "fd00:10::11", "agent", "running,", "pid", "7"],
        ["node2", "node", "10.0.0.12", "fd00:10::12", "the", "lab's", "kube-proxy", "stopped"],
    ]
    demo = report.DemoReport(lab="lab", backend="nft", ok=False, seconds=2.5, scenarios=(result("b", "oh"),))
    assert text(demo.blocks(wide=True)).splitlines()[:2] == [
        "SCENARIO  RESULT  DURATION",
        "b         failed    1.25 s",
    ]


def test_scenarios_have_unique_names_and_short_texts() -> None:
    """The scenarios have unique names, a description, and texts that fit on one or two lines."""
    assert len(SCENARIOS) == len({scenario.name for scenario in SCENARIOS}) == 14
    for scenario in SCENARIOS:
        assert len(scenario.title) <= 60
        assert scenario.description.endswith(".")
        assert len(scenario.why) <= 120


def test_settings_are_merged_at_every_depth() -> None:
    """The settings of one start override the lab's, at every depth."""
    base = {"a": {"x": 1, "y": 2}, "b": 1}
    assert merged(base, {"a": {"y": 3}, "c": 4}) == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}
    assert base == {"a": {"x": 1, "y": 2}, "b": 1}
