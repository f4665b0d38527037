"""`pykubeproxy diff` against live tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli.diff import diff
from pykubeproxy.kernel import Backend, Runner, open_iptables
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import Ruleset
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.root

OBJECTS = str(Path(__file__).parents[1] / "data" / "manifests" / "explain.yaml")
PROGRAM = Path(sys.executable).with_name("pykubeproxy")
OPTIONS = ("--hostname-override", "node1", "--cluster-cidr", "10.244.0.0/16")


@pytest.fixture
def node(inside: str, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Node":
    """A node without rules; commands use the test's lock."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    return Node(backend)


class Node:
    """The node in the test's namespace."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.options: tuple[str, ...] = (*OPTIONS, "--iptables-backend", backend.value)

    def diff(self, *arguments: str, objects: str = OBJECTS) -> Result:
        return CliRunner().invoke(diff, ["-f", objects, *self.options, *arguments], catch_exceptions=False)

    def run_agent_once(self) -> None:
        """Have the agent write its rules once."""
        once = ["--manifests", OBJECTS, "--once", *self.options, "--conntrack-max-per-core", "0"]
        subprocess.run([PROGRAM, "run", *once], check=True, capture_output=True, timeout=PATIENCE)

    def change(self, text: str, family: Family = Family.IPV4) -> None:
        open_iptables(self.backend, family).restore(text)

    def live(self) -> list[Ruleset]:
        return [open_iptables(self.backend, family).save() for family in Family]


def sentences(result: Result) -> list[str]:
    (node,) = json.loads(result.stdout)["nodes"]
    return [str(message) for message in node["rules"]["messages"]]


def test_diff_before_and_after_an_agent_sync(node: Node) -> None:
    """On a fresh node everything is new; afterwards there is no difference."""
    result = node.diff()
    assert result.exit_code == 1
    assert " ".join(result.stdout.split()).count("the tables have no rules of a service proxy") == 2
    node.run_agent_once()
    result = node.diff()
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"No differences: live rules ({node.backend.value}), {OBJECTS}.\n"


def test_node_port_addresses_use_the_nodes_addresses(node: Node) -> None:
    node.options = (*node.options, "--nodeport-addresses", "127.0.0.0/8")
    node.run_agent_once()
    assert node.diff().exit_code == 0


def test_diff_writes_nothing(node: Node, runner: Runner) -> None:
    """It creates no table either, in particular no legacy one."""
    assert node.diff().exit_code == 1
    assert not any(open_iptables(Backend.LEGACY, family, runner).legacy_tables() for family in Family)
    node.run_agent_once()
    node.change("*nat\n-D PREROUTING 1\nCOMMIT\n")
    before = node.live()
    assert node.diff().exit_code == 1
    assert node.live() == before


def test_diff_shows_drift(node: Node) -> None:
    """Foreign rules are left out."""
    node.run_agent_once()
    (web,) = (key.chain for key in node.live()[0].chains if key.chain.startswith("KUBE-SVL-"))
    node.change(
        "*mangle\n-X KUBE-PROXY-CANARY\nCOMMIT\n"
        "*filter\n:MINE - [0:0]\n-I INPUT 1 -j MINE\n-A KUBE-FIREWALL -s 203.0.113.9/32 -j DROP\nCOMMIT\n"
        f"*nat\n-D PREROUTING 1\n:KUBE-SVC-OLD - [0:0]\n:{web} - [0:0]\n-A {web} -j RETURN\nCOMMIT\n"
    )
    assert sentences(node.diff("-o", "json", "--family", "ipv4")) == [
        "table nat: 1 jump added: PREROUTING to KUBE-SERVICES",
        "table mangle: 1 chain added: KUBE-PROXY-CANARY",
        "1 unreferenced chain removed: KUBE-SVC-OLD",
        (
            "ns/web:http (policy Local): 1 endpoint added: 10.244.1.5:8080; no longer passed on;"
            " session affinity none → 1 h"
        ),
    ]
    node.run_agent_once()
    assert node.diff("--family", "ipv4").exit_code == 0


def test_diff_shows_the_effect_of_other_manifests(node: Node, tmp_path: Path) -> None:
    node.run_agent_once()
    new = tmp_path / "new.yaml"
    new.write_text(Path(OBJECTS).read_text().replace("10.244.2.9", "10.244.2.8"))
    assert sentences(node.diff("-o", "json", objects=str(new))) == [
        "kube-system/dns:dns UDP: 1 endpoint removed: 10.244.2.9:53; 1 endpoint added: 10.244.2.8:53",
        "kube-system/dns:dns-tcp: 1 endpoint removed: 10.244.2.9:53; 1 endpoint added: 10.244.2.8:53",
    ]
    rules = node.diff("-o", "rules", objects=str(new)).stdout
    assert rules.startswith(
        f"--- live rules ({node.backend.value}), IPv4\n+++ {new}, IPv4\n@@ -1,3 +1,3 @@ nat KUBE-SVC-"
    )
