"""Without the extra `node`, on Linux and macOS, commands that need no node work, and others say what to do."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubeproxy.kernel import local_addresses
from pykubeproxy.objects import Family
from pykubeproxy.sources.transport import Keepalive
from tests.base_commands import EXTRAS, OF_RULES, ON_NODES, WORKING, api_server, fails, works
from tests.fakes.base_system import EXTRA
from tests.fakes.remote_nodes import SERVING, RemoteNodes

ROOT = Path(__file__).parents[2]
# What runs on nodes only, besides the commands that start it.
NODE_PACKAGES = ("pykubeproxy/agent/", "pykubeproxy/http/", "pykubeproxy/kernel/", "pykubeproxy/lab/")


def program(system: str) -> list[str]:
    return [sys.executable, "-m", "tests.fakes.base_system", system]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with api_server() as running:
        yield running


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs may import tests and pykubeproxy from any folder."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize("name", WORKING)
def test_command_that_needs_no_node_works_on_macos(name: str, url: str, tmp_path: Path) -> None:
    works(program("darwin"), name, url, tmp_path)


@pytest.mark.parametrize("arguments", [("dump-rules",), ("status",), ("check",)], ids=lambda it: it[0])
def test_plugin_reads_nodes_from_macos(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with RemoteNodes(tmp_path) as cluster:
        cluster.pod("p1", "n1")
        cluster.saves("p1", "nft", SERVING)
        options = ("--node", "n1", "--kubeconfig", str(cluster.kubeconfig))
        command = [*program("darwin"), "kubectl", "pykubeproxy", *arguments, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kube-proxy v1.35.1" in done.stdout


@pytest.mark.parametrize("name", ON_NODES)
def test_command_for_nodes_names_the_extra(name: str) -> None:
    fails(program("linux"), ON_NODES[name], f"; run pip install 'pykubeproxy[{EXTRAS[name]}]'")


@pytest.mark.parametrize("name", ON_NODES)
def test_command_for_nodes_says_that_macos_is_none(name: str) -> None:
    fails(program("darwin"), ON_NODES[name], "macOS has no iptables; run this command on a Linux node")


@pytest.mark.parametrize("name", OF_RULES)
def test_command_that_reads_rules_offers_files_on_macos(name: str) -> None:
    fails(program("darwin"), OF_RULES[name], "on a Linux node, or read rules from a file with --rules")


def test_bundle_is_made_on_nodes_only() -> None:
    fails(program("darwin"), ("bundle",), "macOS has no iptables; run this command on a Linux node")


def test_addresses_need_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """`trace` reads the node's addresses without pyroute2."""
    for name in EXTRA:
        monkeypatch.setitem(sys.modules, name, None)
    assert "127.0.0.1" in {it.address for it in local_addresses(Family.IPV4)}


def test_only_packages_for_nodes_use_what_macos_lacks() -> None:
    """For mypy, the modules of Python have other attributes on macOS; those of other packages do not count."""
    options = ["--config-file=", "--follow-imports=skip", "--cache-dir=/dev/null", "--platform=darwin"]
    command = [sys.executable, "-m", "mypy", *options, "pykubeproxy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "has no attribute" in line]
    assert lines, done.stdout + done.stderr
    assert [line for line in lines if not line.startswith(NODE_PACKAGES)] == []


def test_dead_connections_are_noticed_on_macos_in_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS counts unanswered probes, Linux the time."""
    for name in ("TCP_KEEPALIVE", "TCP_KEEPCNT", "TCP_KEEPINTVL"):
        monkeypatch.setattr(f"socket.{name}", name, raising=False)
    monkeypatch.setattr("sys.platform", "darwin")
    values = {name: value for _, name, value in Keepalive(20, 5, 38).options() if isinstance(name, str)}
    assert values == {"TCP_KEEPALIVE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
