"""`pykubeproxy diff` with the objects and the configuration of an agent."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli.diff import diff
from pykubeproxy.nodes import agent as running_agent
from tests.fakes.http_client import free_port
from tests.fakes.process import agent
from tests.unit.agent.conftest import Serve, serve

__all__ = ["serve"]

OBJECTS = str(Path(__file__).parents[2] / "data" / "manifests" / "explain.yaml")
HERE = ("-f", OBJECTS, "--hostname-override", "node1")
AGENT = "objects and configuration of the agent"


def compared(*arguments: object) -> Result:
    return CliRunner().invoke(diff, [str(it) for it in arguments], catch_exceptions=False)


def test_the_agent_on_this_node_is_the_default(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    """Its objects, endpoints and configuration are one side; the other has the configuration in the file."""
    monkeypatch.setattr(running_agent, "DEFAULT_URL", agent(serve))
    result = compared("--against-config", config)
    assert result.exit_code == 1
    first, *sentences = result.stdout.splitlines()
    assert first == f"IPv4: the same objects with {config} → {AGENT}"
    assert sentences == ["  ns/web:http: different rules for the same endpoints"]


def test_the_same_configuration_is_no_difference(serve: Serve, config: Path) -> None:
    url = agent(serve, cluster_cidr="10.0.0.0/8")
    result = compared("--against-config", config, "--url", url)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"No differences: the same objects with {config}, {AGENT}.\n" in result.stderr


def test_its_objects_are_compared_with_those_in_a_file(serve: Serve) -> None:
    """Both for the agent's node and configuration."""
    result = compared("--against", OBJECTS, "--url", agent(serve), "-o", "json", "--family", "ipv4")
    (node,) = json.loads(result.stdout)["nodes"]
    assert (node["before"], node["after"]) == (OBJECTS, AGENT)
    assert any("1 endpoint added: 10.42.1.1:8080" in it for it in node["rules"]["messages"])
    rules = [rule for it in node["rules"]["chains"] for rule in it["added"]]
    assert not any(rule.startswith("! -s ") for rule in rules), "both sides have the agent's configuration"
    assert not any("-d 203.0.113.7/32 " in rule for rule in rules), "the agent reaches the API server there"


def test_quarantined_services_are_named(serve: Serve, config: Path) -> None:
    """Their live rules differ from those for their objects."""
    result = compared("--against-config", config, "--url", agent(serve))
    assert "the agent has quarantined ns/api:http; their rules differ.\n" in result.stderr


def test_without_an_agent_the_output_says_that_settings_are_defaults(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    """With --url, it is an error."""
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(running_agent, "DEFAULT_URL", url)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = compared("--against", OBJECTS)
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "Reading from the API server, with default settings: cannot reach an agent"
    )
    assert compared("--url", url).stderr == (
        f"Error: cannot reach an agent at {url}: Connection refused; correct --url, or use -f or flags of `run` instead\n"
    )
    (one_node := tmp_path / "node.yaml").write_text("apiVersion: v1\nkind: Node\nmetadata: {name: node1}\n")
    result = compared("-f", one_node, "--against-config", config)
    assert (
        result.stderr
        == f"No differences: the same objects with {config}, {one_node} with default settings.\n"
    )
