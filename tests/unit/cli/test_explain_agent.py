"""`pykubeproxy explain` with the objects of an agent, and without an agent."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pykubeproxy import http
from pykubeproxy.cli.explain import explain
from pykubeproxy.nodes import agent as running_agent
from pykubeproxy.objects import Node
from pykubeproxy.pages.servicez import NodeObjects, ObjectDocument, encode
from tests.fakes.http_client import free_port
from tests.fakes.process import agent
from tests.objects import service
from tests.unit.agent.conftest import Serve, serve

__all__ = ["serve"]

OBJECTS = str(Path(__file__).parents[2] / "data" / "manifests" / "explain.yaml")


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(explain, arguments)


def test_its_objects_and_its_configuration(serve: Serve) -> None:
    """The node is the agent's, and so is what it takes for pods."""
    result = asked("web", "--url", agent(serve))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("On node1 in a:\n")
    assert "100%  10.42.1.1:8080" in result.stdout
    assert "traffic from 10.42.0.0/16 keeps" in " ".join(result.stdout.split())


def test_a_quarantined_service_is_explained(serve: Serve) -> None:
    """The agent knows whom it does not serve; how another node fares it does not."""
    url = agent(serve)
    said = "Quarantined: No such file."
    assert said in " ".join(asked("api", "--url", url).stdout.split())
    (entry,) = json.loads(asked("api", "--url", url, "-o", "json").stdout)["services"][0]["ports"]
    assert (entry["quarantined"], entry["destinations"][0].startswith(said)) == (True, True)
    assert "Quarantined" not in asked("web", "--url", url).stdout
    assert "Quarantined" not in asked("api", "--url", url, "--node", "node2").stdout


def test_another_node(serve: Serve) -> None:
    """Of other nodes an agent knows their zone from the endpoints that are there."""
    result = asked("ns/web", "--url", agent(serve), "--node", "node2", "-o", "json")
    document = json.loads(result.stdout)
    assert document["nodes"] == [{"name": "node2", "zone": "b"}, {"name": "node1", "zone": "a"}]
    (policy,) = document["services"][0]["ports"][0]["policies"]
    used = [[it["address"] for it in group["endpoints"] if it["used"]] for group in policy["groups"]]
    assert used == [["10.42.2.2"], ["10.42.1.1"]]


def test_agent_on_this_node_is_the_default(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options, explain asks the agent on this node."""
    monkeypatch.setattr(running_agent, "DEFAULT_URL", agent(serve))
    assert asked("web").stdout.startswith("On node1 in a:\n")


def test_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an agent, explain reads from the API server and says so; with --url it fails."""
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(running_agent, "DEFAULT_URL", url)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = asked("web")
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first == (
        f"Reading from the API server, with default settings: cannot reach an agent at {url}: Connection refused."
    )
    assert second == (
        "Error: no API server configured: set --kubeconfig or --master, or run in a pod with a service account; "
        "use -f to read objects from files"
    )
    assert asked("web", "--url", url).stderr == (
        f"Error: cannot reach an agent at {url}: Connection refused; correct --url, or use -f or flags of `run` instead\n"
    )


def test_files_and_flags_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With -f or flags of `run`, explain asks no agent."""
    monkeypatch.setattr(running_agent, "fetch", lambda *_, **__: pytest.fail("explain asked an agent"))
    assert asked("web", "-f", OBJECTS, "--hostname-override", "node1").exit_code == 0
    asked("web", "--hostname-override", "node1")
    result = asked("web", "-f", OBJECTS, "--url", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert "cannot be combined with -f" in " ".join(result.stderr.split())


def test_service_unknown_to_agent(serve: Serve) -> None:
    """An agent does not watch all Services; the error says which, and where else to look."""
    result = asked("nosuch", "--url", agent(serve))
    assert result.exit_code == 2
    assert "has no Service nosuch; for a headless Service" in result.stderr


def answering(serve: Serve, body: bytes) -> str:
    """Return the URL of a server that responds with `body`."""
    return f"http://127.0.0.1:{serve(http.router({'/servicez': lambda _: http.Response(body, http.JSON)}))}"


OBJECTS_OF_WEB = NodeObjects(Node("n"), (service("web"),))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "truncated"),
        (b'{"x":' + b"[" * 100_000, "it is nested too deeply"),
        (encode(ObjectDocument(OBJECTS_OF_WEB, "mode: ipvs")), "kind: is missing"),
        (encode(ObjectDocument(OBJECTS_OF_WEB, "x" * 200_000)), "its configuration is longer than"),
    ],
)
def test_other_server(serve: Serve, body: bytes, reason: str) -> None:
    """For any other response, the error names the address and the cause."""
    url = answering(serve, body)
    result = asked("web", "--url", url)
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith(f"Error: {url} is not an agent of this pykubeproxy version: ")
    assert reason in result.stderr


def test_busy_agent(serve: Serve) -> None:
    """explain repeats its question while the agent is syncing, and gives up after a while."""
    assert asked("web", "--url", agent(serve, busy=4)).stdout.startswith("On node1 in a:\n")
    result = asked("web", "--url", agent(serve, busy=5))
    assert result.exit_code == 2
    assert "returned status 503; retry, or pass --config" in result.stderr


def test_an_agent_without_a_usable_answer_is_not_replaced_by_default_settings(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of the API server's default would explain other rules than the agent's."""
    monkeypatch.setattr(running_agent, "DEFAULT_URL", agent(serve, busy=5))
    assert "returned status 503; retry, or pass --config" in asked("web").stderr
    body = encode(ObjectDocument(NodeObjects(Node("n")), "", version="0.0.1"))
    monkeypatch.setattr(running_agent, "DEFAULT_URL", answering(serve, body))
    assert "its version is 0.0.1" in asked("web").stderr


def test_one_family() -> None:
    """The other is left out, with what is said of it."""
    result = asked("web", "-f", OBJECTS, "--hostname-override", "node1", "--family", "ipv6", "-o", "json")
    document = json.loads(result.stdout)
    (found,) = document["services"]
    assert {it["family"] for it in [*found["ports"], *found["skippedFamilies"]]} <= {"IPv6"}


def test_the_api_server_addresses_are_those_of_the_agent(serve: Serve) -> None:
    """Not those of this command, which asks no API server."""
    text = " ".join(asked("web", "--url", agent(serve)).stdout.split())
    assert "203.0.113.7:80 is not served: this node reaches the API server there." in text
