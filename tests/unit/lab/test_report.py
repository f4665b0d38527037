"""How the lab tells what it saw, and the scenarios' own texts."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import click
import pytest

from pykubeproxy.lab import documents, report, requirements
from pykubeproxy.lab.agents import merged
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.requirements import Unmet
from pykubeproxy.lab.scenarios import SCENARIOS, Say, Scenario, ScenarioFailed

LAB = cast("Lab", SimpleNamespace(reset=lambda: None, logs=Path("/run/lab/logs")))


def told(run: object) -> tuple[report.Result, list[str]]:
    """What came of it and the lines written."""
    lines: list[str] = []
    scenario = Scenario("x", "A title", "What is done.", "Why it is so. " * 8, "a command", run)  # type: ignore[arg-type]
    result = report.run_scenario(LAB, scenario, "1/1", lines.append)
    return result, [click.unstyle(line) for line in lines]


def test_what_was_seen() -> None:
    """Title, what is done, what was seen, why and where to look, within 80 columns."""

    def run(_lab: Lab, say: Say) -> None:
        say("3 pods", "600 connections: " + ", ".join(f"web-{number} 200" for number in range(12)))

    result, lines = told(run)
    assert result.well
    assert result.seen[0][0] == "3 pods"
    assert max(map(len, lines)) <= report.WIDTH
    text = "\n".join(lines)
    assert "A title" in text
    assert "3 pods" in text
    assert "web-11 200" in text
    assert "a command" in text


@pytest.mark.parametrize(
    "failure", [ScenarioFailed("expected a; seen: b"), TimeoutError("still not: c"), KeyError("oops")]
)
def test_a_failure_is_told(failure: Exception) -> None:
    """Whatever goes wrong is a failed scenario with its reason, not the end of the demo."""

    def run(_lab: Lab, _say: Say) -> None:
        raise failure

    result, lines = told(run)
    assert not result.well
    assert str(failure.args[0]) in result.failure
    assert any("FAILED" in line and str(failure.args[0]) in line for line in lines)


def result(name: str, failure: str = "") -> report.Result:
    return report.Result(name, f"Title of {name}", 1.25, (("1 pod", "all of them"),), failure)


def test_summary() -> None:
    """The last line counts the failed ones and names them; many names are broken over lines of 80 columns."""
    assert "All 2 scenarios" in report.summary([result("a"), result("b")], 1.0)
    assert "1 of 2 scenarios failed: b" in report.summary([result("a"), result("b", "oh")], 1.0)
    all_failed = report.summary([result(it.name, "oh") for it in SCENARIOS], 100.0)
    assert max(map(len, all_failed.splitlines())) <= report.WIDTH


def test_documents() -> None:
    """What scenarios saw, and which there are, for programs."""
    document = documents.demonstrated("x", "nft", [result("a"), result("b", "expected c")], 2.5)
    assert document["apiVersion"] == "pykubeproxy/v1"
    assert (document["ok"], document["seconds"]) == (False, 2.5)
    assert document["scenarios"] == [
        {
            "name": "a",
            "title": "Title of a",
            "ok": True,
            "seconds": 1.25,
            "seen": [{"label": "1 pod", "text": "all of them"}],
            "failure": None,
        },
        {
            "name": "b",
            "title": "Title of b",
            "ok": False,
            "seconds": 1.25,
            "seen": [{"label": "1 pod", "text": "all of them"}],
            "failure": "expected c",
        },
    ]
    listed = documents.listed(SCENARIOS)["scenarios"]
    assert isinstance(listed, list)
    assert {entry["name"] for entry in listed} == {it.name for it in SCENARIOS}


def test_the_scenarios() -> None:
    """Ten of them, each with a name of its own and texts that fit on a line or two."""
    assert len(SCENARIOS) == len({scenario.name for scenario in SCENARIOS}) == 10
    for scenario in SCENARIOS:
        assert len(scenario.title) <= 60
        assert len(scenario.why) <= 120


def test_settings_are_merged() -> None:
    """Settings of one start go on top of the lab's, at every depth."""
    base = {"a": {"x": 1, "y": 2}, "b": 1}
    assert merged(base, {"a": {"y": 3}, "c": 4}) == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}
    assert base == {"a": {"x": 1, "y": 2}, "b": 1}


def test_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root the lab says so in one line."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(Unmet, match="needs root") as caught:
        requirements.require()
    assert "\n" not in str(caught.value)


def test_missing_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing tool is named, with how to install it."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool, path: None if tool == "ip6tables-save" else tool)
    with pytest.raises(Unmet, match="missing: ip6tables-save; install them with `apt-get install iptables`"):
        requirements.require()
