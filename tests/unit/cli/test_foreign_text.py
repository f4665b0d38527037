"""What tenants, nodes and files say cannot forge a line or control a terminal, whatever command shows it."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pykubeproxy.bundle.layout import OBJECTS, STATUS
from pykubeproxy.cli import main
from pykubeproxy.cli.kubectl import plugin
from pykubeproxy.objects import Family
from pykubeproxy.pages.statusz import AgentStatus, FamilyStatus, RepairRecord, SyncRecord, encode
from pykubeproxy.rules.drift import TableDrift
from tests.cases import as_restore_input, load_case
from tests.fakes.bundles import failing, section, written
from tests.fakes.remote_nodes import SERVING, RemoteNodes

FORGED = "Error: the cluster is broken; run kubectl delete ns prod"
HOSTILE = f"x\n\x1b[31m{FORGED}\x1b[0m\r\u202e\u200b\x9b2J"
CIDRS = "--cluster-cidr=10.244.0.0/16"


def shown(program: click.Command, *arguments: str) -> str:
    """Return all that a command prints; it has neither a forged line nor a character that does not show."""
    result = CliRunner().invoke(program, [*arguments], color=True, catch_exceptions=False)
    assert f"\x1b[31m{FORGED}" not in result.output
    lines = click.unstyle(result.output).split("\n")
    assert not [line for line in lines if line.lstrip().startswith(FORGED[:12])]
    assert all(line.replace("\t", "").isprintable() for line in lines), lines
    return result.output


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    """A file with names of pods, nodes and zones that only an API server in a test would accept."""
    case = json.loads(json.dumps(load_case("lb-local")))
    for it in case["objects"]:
        if it["kind"] == "EndpointSlice":
            for endpoint in it["endpoints"]:
                endpoint["targetRef"] = {"kind": "Pod", "name": HOSTILE, "namespace": HOSTILE}
                endpoint["zone"] = HOSTILE
                endpoint["nodeName"] = endpoint.get("nodeName") or HOSTILE
    bad = {"kind": "Service", "apiVersion": "v1", "metadata": {"name": HOSTILE, "namespace": HOSTILE}}
    other = {"kind": HOSTILE, "apiVersion": HOSTILE}
    node = {**case["node"], "metadata": {**case["node"]["metadata"]}}
    node["metadata"]["labels"] = {"topology.kubernetes.io/zone": HOSTILE}
    path = tmp_path / "objects.json"
    path.write_text(json.dumps({"kind": "List", "items": [*case["objects"], node, bad, other]}))
    return str(path)


@pytest.fixture
def rules(tmp_path: Path) -> str:
    """Rules whose comments are hostile."""
    path = tmp_path / "rules.txt"
    text = as_restore_input("lb-local", Family.IPV4)
    path.write_text(text.replace('--comment "ns1/web:http', f'--comment "ns1/web:http {HOSTILE}'))
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("trace", "10.244.1.99", "svc/ns1/web:http"),
        ("trace", "10.244.1.99", "svc/ns1/web:http", "-o", "json"),
        ("trace", "10.244.1.99", "svc/ns1/web:http", "-o", "svg"),
        ("trace", f"pod/{HOSTILE}", "svc/ns1/web:http"),
        ("explain", "ns1/web"),
        ("explain", "ns1/web", "--node", HOSTILE),
        ("explain", "ns1/web", "--zone", HOSTILE, "-o", "json"),
        ("render",),
    ],
)
def test_objects(arguments: tuple[str, ...], manifest: str) -> None:
    output = shown(main, *arguments, "-f", manifest, CIDRS)
    if "10.244.1.99" in arguments and arguments[-1] not in ("svg", "json"):
        assert r"x\n\x1b[31mError: " in output


@pytest.mark.parametrize(
    "arguments",
    [
        ("dump-rules",),
        ("dump-rules", "-o", "rules"),
        ("dump-rules", "-o", "yaml"),
        ("dump-rules", HOSTILE),
        ("trace", "10.244.1.99", "10.96.1.1:80"),
        ("trace", "10.244.1.99", "10.96.1.1:80", "-o", "svg"),
        ("trace", "10.244.1.99", HOSTILE),
    ],
)
def test_rules(arguments: tuple[str, ...], rules: str) -> None:
    shown(main, *arguments, "--rules", rules)


@pytest.mark.parametrize("options", [("-o", "text"), ("-o", "rules"), ("-o", "json"), ("--meaning",)])
def test_comparisons(options: tuple[str, ...], rules: str, manifest: str) -> None:
    shown(main, "diff", "--rules", rules, "-f", manifest, CIDRS, "--hostname-override", "node1", *options)


def test_files_with_hostile_names(tmp_path: Path, rules: str) -> None:
    path = tmp_path / f"rules {HOSTILE}".replace("/", "")
    path.write_bytes(Path(rules).read_bytes())
    assert "50%" in shown(main, "trace", "10.244.1.99", "10.96.1.1:80", "--rules", str(path))
    path.write_text(f"{HOSTILE}\n")
    assert "Error: " in shown(main, "dump-rules", "--rules", str(path))


def test_the_status_in_a_bundle(tmp_path: Path) -> None:
    """A node wrote it, and its own name, its writers and failures are hostile."""
    told = AgentStatus(
        version=HOSTILE,
        node=HOSTILE,
        backend=HOSTILE,
        started=0,
        now=60,
        healthy=True,
        ready=True,
        alive=True,
        node_eligible=True,
        families=(FamilyStatus(HOSTILE, False),),
        unavailable_families={HOSTILE: HOSTILE},
        syncs=(SyncRecord(1, HOSTILE, True, 1.0, 1, HOSTILE),),
        repairs=(RepairRecord(1, HOSTILE, 1.0, (TableDrift(HOSTILE, 1),), (HOSTILE,)),),
    )
    path = tmp_path / "node.tar.gz"
    path.write_bytes(
        written([section(STATUS, encode(told)), failing(OBJECTS, OSError(HOSTILE))], node=HOSTILE)
    )
    shown(main, "status", "--bundle", str(path))
    shown(main, "explain", "ns1/web", "--bundle", str(path))
    shown(main, "dump-rules", "--bundle", str(path))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteNodes]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr("pykubeproxy.cli.diff._wait", lambda seconds: None)
    with RemoteNodes(tmp_path) as running:
        running.pod("p1", "n1", image=f"kube-proxy:{HOSTILE}", restarts=2)
        running.saves("p1", "nft", SERVING.replace('default/web:http"', f'default/web:http {HOSTILE}"'))
        running.pod("p2", "n2", phase="Pending", waiting=HOSTILE)
        running.pod("p3", "n3")
        running.program("p3", "iptables-nft-save", errors=HOSTILE, code=4)
        yield running


@pytest.mark.parametrize("command", ["status", "check", "dump-rules", "diff"])
def test_nodes_of_a_cluster(command: str, cluster: RemoteNodes) -> None:
    shown(plugin, command)
