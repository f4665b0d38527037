"""`pykubeproxy explain` with files."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from pykubeproxy.cli.explain import explain

OBJECTS = str(Path(__file__).parents[2] / "data" / "manifests" / "explain.yaml")


def explained(*arguments: str, objects: str = OBJECTS) -> Result:
    return CliRunner().invoke(explain, [*arguments, "-f", objects], catch_exceptions=False)


def headlines(result: Result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line and not line.startswith(" ")]


def test_this_node() -> None:
    """Explain for the node of --hostname-override."""
    result = explained("web", "--hostname-override", "node1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert headlines(result) == ["On node1 in zone-a:", "ns/web:http  TCP IPv4"]
    assert "    100%  10.244.1.5:8080  on node1: ready\n" in result.stdout


def test_one_port() -> None:
    """Select a port by name or number, and a namespace by prefix or option."""
    here = ("--hostname-override", "node1")
    named = explained("kube-system/dns:dns-tcp", *here)
    assert headlines(named)[1:] == ["kube-system/dns:dns-tcp  TCP IPv4"]
    assert headlines(explained("dns:53", "-n", "kube-system", *here))[1:] == [
        "kube-system/dns:dns  UDP IPv4",
        "kube-system/dns:dns-tcp  TCP IPv4",
    ]


def test_other_node() -> None:
    """With --node, explain for that node and for this node."""
    result = explained("web", "--hostname-override", "node1", "--node", "node2")
    assert headlines(result) == ["ns/web:http  TCP IPv4"]
    titles = [line.strip() for line in result.stdout.splitlines() if line.startswith("    On ")]
    assert titles == [
        "On node2 in zone-b:",
        "On node1 in zone-a:",
        "On node2 in zone-b:",
        "On node1 in zone-a:",
    ]


def test_other_zone() -> None:
    """With --zone alone, explain for this node in another zone."""
    result = explained("web", "--hostname-override", "node1", "--zone", "zone-c")
    assert "    On node1 in zone-c:\n" in result.stdout
    assert "Hints for zones are ignored: no ready endpoint is hinted for zone-c." in result.stdout
    assert "    On node1 in zone-a:\n" in result.stdout


def test_node_alone() -> None:
    """With several Nodes in the files, --node is enough; without a name it is an error."""
    result = explained("web", "--node", "node2")
    assert headlines(result) == ["On node2 in zone-b:", "ns/web:http  TCP IPv4"]
    result = explained("web")
    assert result.exit_code == 2
    assert (
        result.stderr == "Error: there are several Nodes: node1, node2; select one with --hostname-override\n"
    )


def test_unknown_node() -> None:
    """A missing Node has no zone, and a line says so."""
    result = explained("web", "--hostname-override", "node1", "--node", "node9")
    assert result.exit_code == 0
    assert result.stderr == "There is no Node node9, so its zone is unknown.\n"
    assert "    On node9, zone unknown:\n" in result.stdout


def test_json() -> None:
    """The document names both nodes."""
    result = explained("web", "--hostname-override", "node1", "--node", "node2", "-o", "json")
    document = json.loads(result.stdout)
    assert document["nodes"] == [{"name": "node2", "zone": "zone-b"}, {"name": "node1", "zone": "zone-a"}]
    assert [it["policy"] for it in document["services"][0]["ports"][0]["policies"]] == ["Cluster", "Local"]
    assert "\N{NO-BREAK SPACE}" not in result.stdout


def test_errors() -> None:
    """A missing object is one line on standard error and exit code 2, as are invalid arguments."""
    here = ("--hostname-override", "node1")
    result = explained("ns/wob", *here)
    assert (result.exit_code, result.stdout, result.stderr) == (
        2,
        "",
        "Error: there is no Service ns/wob; did you mean ns/web?\n",
    )
    result = explained("ns/web:x", *here)
    assert result.stderr == 'Error: Service ns/web has no port "x"; it has 80 (http)\n'
    assert explained("a/b/c", *here).exit_code == 2
    assert explained("", *here).exit_code == 2
    assert explained("web", *here, objects="missing.yaml").exit_code == 2
