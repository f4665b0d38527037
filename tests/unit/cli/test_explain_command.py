"""`pykubeproxy explain` with manifests: what it takes, what it says, how it fails."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from pykubeproxy.cli.explain import explain

OBJECTS = str(Path(__file__).parents[2] / "data" / "manifests" / "explain.yaml")


def explained(*arguments: str, objects: str = OBJECTS) -> Result:
    return CliRunner().invoke(explain, [*arguments, "-f", objects], catch_exceptions=False)


def headlines(result: Result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line and not line.startswith(" ")]


def test_here() -> None:
    """A Service is explained for the node that --hostname-override names."""
    result = explained("web", "--hostname-override", "node1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert headlines(result) == ["On node1 in zone-a:", "ns/web:http  TCP IPv4"]
    assert "    100%  10.244.1.5:8080  ready\n" in result.stdout


def test_one_port() -> None:
    """A port is asked for by name or number; a namespace by either way."""
    here = ("--hostname-override", "node1")
    named = explained("kube-system/dns:dns-tcp", *here)
    assert headlines(named)[1:] == ["kube-system/dns:dns-tcp  TCP IPv4"]
    assert headlines(explained("dns:53", "-n", "kube-system", *here))[1:] == [
        "kube-system/dns:dns  UDP IPv4",
        "kube-system/dns:dns-tcp  TCP IPv4",
    ]


def test_other_node() -> None:
    """With --node it is explained for that one, and this node's differences come last."""
    result = explained("web", "--hostname-override", "node1", "--node", "node2")
    assert headlines(result) == [
        "On node2 in zone-b:",
        "ns/web:http  TCP IPv4",
        "On node1 in zone-a it is otherwise:",
    ]
    assert "    10.244.1.5:8080 is used: ready\n" in result.stdout


def test_other_zone() -> None:
    """With --zone alone it is this node that is in another zone."""
    result = explained("web", "--hostname-override", "node1", "--zone", "zone-c")
    assert headlines(result)[0] == "On node1 in zone-c:"
    assert "Hints for zones are not heeded: no ready endpoint is hinted for zone-c." in result.stdout
    assert headlines(result)[-1] == "On node1 in zone-a it is otherwise:"


def test_node_alone() -> None:
    """Among manifests with several Nodes --node is enough; without any name there is no telling which it is."""
    result = explained("web", "--node", "node2")
    assert headlines(result) == ["On node2 in zone-b:", "ns/web:http  TCP IPv4"]
    result = explained("web")
    assert result.exit_code == 1
    assert (
        result.stderr == "Error: there are several Nodes; name one with --hostname-override: node1, node2\n"
    )


def test_unknown_node() -> None:
    """A Node that is not there has no zone, and a line says so."""
    result = explained("web", "--hostname-override", "node1", "--node", "node9")
    assert result.exit_code == 0
    assert result.stderr == "There is no Node node9, so its zone is not known.\n"
    assert headlines(result)[0] == "On node9, whose zone is not known:"


def test_json() -> None:
    """The document names both places."""
    result = explained("web", "--hostname-override", "node1", "--node", "node2", "-o", "json")
    document = json.loads(result.stdout)
    assert document["place"] == {"node": "node2", "zone": "zone-b"}
    assert document["differences"]["place"] == {"node": "node1", "zone": "zone-a"}
    assert [it["policy"] for it in document["services"][0]["policies"]] == ["Cluster", "Local"]
    assert "\N{NO-BREAK SPACE}" not in result.stdout


def test_not_there() -> None:
    """What is not there is one line on standard error and exit code 1; what makes no sense is 2."""
    here = ("--hostname-override", "node1")
    result = explained("ns/wob", *here)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "Error: there is no Service ns/wob\n")
    result = explained("ns/web:x", *here)
    assert result.stderr == 'Error: Service ns/web has no port "x"; it has 80 (http)\n'
    assert explained("a/b/c", *here).exit_code == 2
    assert explained("", *here).exit_code == 2
    assert explained("web", *here, objects="missing.yaml").exit_code == 1
