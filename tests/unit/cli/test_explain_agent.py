"""`pykubeproxy explain` by an agent's word: what it is asked, and what becomes of it when nobody answers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.agent import http
from pykubeproxy.agent.observe import object_documents as told
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.object_documents import Objects
from pykubeproxy.agent.observe.pages import metrics_pages
from pykubeproxy.agent.observe.query import look
from pykubeproxy.agent.observe.status import Filter
from pykubeproxy.agent.quarantine.quarantine import Quarantined
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.cli import explain as command
from pykubeproxy.cli.explain import explain
from pykubeproxy.config import load
from pykubeproxy.objects import Family, Kind, Listed, Node
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from tests.fakes.asking import free_port
from tests.objects import endpoint, service, slice_of
from tests.unit.agent.conftest import Serve, serve

__all__ = ["serve"]

OBJECTS = str(Path(__file__).parents[2] / "data" / "manifests" / "explain.yaml")
REFUSED = PortName("ns", "api", "http", "TCP")
REFUSING = cast(
    "FamilyTables",
    SimpleNamespace(family=Family.IPV4, set_aside=lambda: (Quarantined(REFUSED, "No such file", 1.0),)),
)
CONFIG = load(None, {"cluster-cidr": "10.42.0.0/16"}).config


def cluster() -> Cluster:
    made = Cluster()
    made.apply(Listed(Kind.SERVICE, (service("web"), service("api", cluster_ip="10.96.0.9"))))
    endpoints = (
        endpoint("10.42.1.1", node_name="node1", zone="a", zone_hints=("a",)),
        endpoint("10.42.2.2", node_name="node2", zone="b", zone_hints=("b",)),
    )
    made.apply(Listed(Kind.ENDPOINT_SLICE, (slice_of(*endpoints, service="web"),)))
    made.apply(Listed(Kind.NODE, (Node("node1", ("192.168.99.10",), zone="a"),)))
    return made


def agent(serve: Serve, busy: bool = False) -> str:
    """The address of an agent that has these objects."""

    def objects(wanted: Filter) -> Objects | None:
        return None if busy else look(cluster(), [REFUSING], "node1", wanted)

    page = metrics_pages(Metrics(lambda _: None).page, lambda: CONFIG, {}, None, objects)
    return f"http://127.0.0.1:{serve(page)}"


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(explain, arguments)


def test_its_objects_and_its_configuration(serve: Serve) -> None:
    """The node is the agent's, and so is what it takes for pods."""
    result = asked("web", "--url", agent(serve))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("On node1 in a:\n")
    assert "100%  10.42.1.1:8080" in result.stdout
    assert "kept for traffic from 10.42.0.0/16" in " ".join(result.stdout.split())


def test_set_aside(serve: Serve) -> None:
    """The agent knows whom it does not serve; how another node fares it does not."""
    url = agent(serve)
    said = "It is set aside, for iptables refuses its rules: No such file."
    assert said in " ".join(asked("api", "--url", url).stdout.split())
    (entry,) = json.loads(asked("api", "--url", url, "-o", "json").stdout)["services"]
    assert (entry["setAside"], entry["notes"][0].startswith(said)) == (True, True)
    assert "set aside" not in asked("web", "--url", url).stdout
    assert "set aside" not in asked("api", "--url", url, "--node", "node2").stdout


def test_another_node(serve: Serve) -> None:
    """Of other nodes an agent knows their zone from the endpoints that are there."""
    result = asked("ns/web", "--url", agent(serve), "--node", "node2", "-o", "json")
    document = json.loads(result.stdout)
    assert document["place"] == {"node": "node2", "zone": "b"}
    assert [it["address"] for it in document["differences"]["endpoints"]] == ["10.42.1.1", "10.42.2.2"]


def test_without_anything_this_nodes_agent_is_asked(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be given where the agent runs."""
    monkeypatch.setattr(command, "DEFAULT_URL", agent(serve))
    assert asked("web").stdout.startswith("On node1 in a:\n")


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the API server is asked, and a line says so; but not in place of an agent that was named."""
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(command, "DEFAULT_URL", url)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = asked("web")
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert first == f"Asking the API server, for no agent answers at {url}: Connection refused."
    assert second == (
        "Error: no API server to talk to: give --kubeconfig or --master, or run in a pod with a service account; "
        "with -f the objects are taken from files"
    )
    assert asked("web", "--url", url).stderr == f"Error: no agent answers at {url}: Connection refused\n"


def test_files_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gives objects or a configuration is not answered by an agent."""
    monkeypatch.setattr(command, "ask", lambda *_, **__: pytest.fail("an agent was asked"))
    assert asked("web", "-f", OBJECTS, "--hostname-override", "node1").exit_code == 0
    asked("web", "--hostname-override", "node1")
    result = asked("web", "-f", OBJECTS, "--url", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert "drop -f and other flags" in " ".join(result.stderr.split())


def test_what_it_does_not_know(serve: Serve) -> None:
    """An agent does not watch all Services; a line says which, and where else to ask."""
    result = asked("nosuch", "--url", agent(serve))
    assert result.exit_code == 1
    assert "has no Service nosuch. It does not watch headless Services" in result.stderr


def answering(serve: Serve, body: bytes) -> str:
    """The address of something that answers with this."""
    return f"http://127.0.0.1:{serve(http.pages({'/servicez': lambda: http.Answer(body, http.JSON)}))}"


def test_another_version(serve: Serve) -> None:
    """Programs of two versions do not read each other's objects."""
    body = told.encode(told.ObjectDocument(Objects(Node("n")), "", version="0.0.1"))
    assert "it is of version 0.0.1, and this is" in asked("web", "--url", answering(serve, body)).stderr


OBJECTS_OF_WEB = Objects(Node("n"), (service("web"),))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "truncated"),
        (b'{"x":' + b"[" * 100_000, "it is nested too deeply"),
        (told.encode(told.ObjectDocument(OBJECTS_OF_WEB, "mode: ipvs")), "kind: is missing"),
        (told.encode(told.ObjectDocument(OBJECTS_OF_WEB, "x" * 200_000)), "its configuration is longer than"),
    ],
)
def test_no_agent_at_all(serve: Serve, body: bytes, reason: str) -> None:
    """Whatever it says, an error names the address and what is wrong."""
    url = answering(serve, body)
    result = asked("web", "--url", url)
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith(f"Error: what answers at {url} cannot be asked: ")
    assert reason in result.stderr


def test_a_busy_agent(serve: Serve) -> None:
    """One that is syncing says so."""
    assert "answers with status 503" in asked("web", "--url", agent(serve, busy=True)).stderr


def test_one_family() -> None:
    """The other is left out, with what is said of it."""
    result = asked("web", "-f", OBJECTS, "--hostname-override", "node1", "--family", "ipv6", "-o", "json")
    document = json.loads(result.stdout)
    assert {it["family"] for it in [*document["services"], *document["leftOut"]]} <= {"IPv6"}
