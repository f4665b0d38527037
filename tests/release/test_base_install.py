"""Commands that need no node run without the extra `node`, also on macOS."""

import subprocess
import sys
import tomllib
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


@pytest.mark.parametrize("arguments", [("dump-rules",), ("status",), ("check",)], ids=lambda item: item[0])
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
    assert "127.0.0.1" in {item.address for item in local_addresses(Family.IPV4)}


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
    values = {str(name): value for _, name, value in Keepalive(20, 5, 38).options()}
    wanted = {"TCP_KEEPALIVE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
    assert values.items() >= wanted.items()


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
# The oldest and the newest supported version; 10.15 is the oldest macOS for which python.org has both.
PYTHONS = ("3.11", "3.14")
SYSTEMS = ("macosx_11_0_arm64", "macosx_10_15_x86_64")
# A package ends its wheels for an old version of Python, or for Intel's processors: either is in one of two pairs.
PAIRS = [*zip(PYTHONS, SYSTEMS, strict=True)]


def resolve(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Let pip find what it would install, from wheels only."""
    options = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:", f"--target={folder}"]
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip unless pip reaches a package index."""
    if resolve(tmp_path_factory.mktemp("index"), "--no-deps", "--retries=0", "click").returncode:
        pytest.skip("pip reaches no package index")


def test_versions_begin_with_the_oldest_supported_one() -> None:
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(("python", "system"), PAIRS)
def test_all_requirements_have_wheels(python: str, system: str, tmp_path: Path) -> None:
    found = resolve(tmp_path, f"--python-version={python}", f"--platform={system}", *PROJECT["dependencies"])
    assert found.returncode == 0, found.stderr


@pytest.mark.usefixtures("index")
def test_the_extra_needs_a_compiler(tmp_path: Path) -> None:
    """Pip reports a requirement without wheels."""
    found = resolve(tmp_path, f"--platform={SYSTEMS[0]}", *PROJECT["optional-dependencies"]["node"])
    assert "python-iptables" in found.stderr
