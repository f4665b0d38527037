"""What a start imports, and when: the agent asks for the lists first, and imports most of its modules meanwhile."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from pykubeproxy import kernel

# Packages and modules that the first request does not need. Each takes 5 to 160 ms to import.
UNUSED = {
    "h11",
    "kubernetes",
    "prometheus_client",
    "pydantic",
    "pykubeproxy.agent.assembly",
    "pykubeproxy.inspect",
    "pykubeproxy.kernel.iptables",
    "pykubeproxy.rules",
    "pykubeproxy.services",
    "pykubeproxy.sources.manifests",
    "pyroute2",
    "requests",
    "websocket",
}
# Run the command line in `argv`; print what was imported when `stop` was reached, or at the end.
PROGRAM = """
import json, sys
from unittest import mock
from pykubeproxy.cli import main

def report(*_, **__):
    print(json.dumps(sorted(sys.modules)), file=sys.__stdout__, flush=True)
    raise SystemExit(0)

if "--help" in sys.argv:
    try:
        main()
    finally:
        report()
from pykubeproxy.sources import credential_store
from pathlib import Path
credential_store._POD_FOLDER = Path(sys.argv.pop())

with mock.patch("pykubeproxy.agent.process.InstanceLock"), mock.patch("pykubeproxy.agent.process.take_over"):
    with mock.patch("pykubeproxy.agent.process.start_thread", report):
        main()
"""
KUBECONFIG = """
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1", certificate-authority: ca.crt}}]
users: [{name: u, user: {client-certificate-data: Y2VydA==, client-key-data: a2V5, tokenFile: token}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
"""


def imported(*arguments: str, **environment: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_help_of_run_imports_no_libraries_of_the_agent() -> None:
    found = imported("run", "--help")
    assert "pykubeproxy.cli.run" in found
    assert found & (UNUSED | {"pykubeproxy.kernel", "pykubeproxy.sources", "structlog", "urllib3"}) == set()


@pytest.mark.parametrize("way", ["pod", "kubeconfig"])
def test_an_agent_asks_for_the_lists_before_it_imports_the_rest(tmp_path: Path, way: str) -> None:
    """It never imports the kubernetes client."""
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    options, pod = [f"--kubeconfig={tmp_path}/kubeconfig"], {}
    if way == "pod":
        options, pod = [], {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    found = imported("run", "--hostname-override=n", *options, str(tmp_path), **pod)
    assert {"pykubeproxy.agent.process", "pykubeproxy.sources.client", "urllib3"} <= found
    assert found & UNUSED == set()


def test_the_whole_agent_needs_no_kubernetes_client() -> None:
    code = "import sys, pykubeproxy.agent.assembly; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def typed_names() -> list[tuple[str, str]]:
    """The modules and names that `kernel` declares for mypy."""
    tree = ast.parse(Path(str(kernel.__file__)).read_text())
    # Type checkers accept any name of a module that has this function.
    assert not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    block, _ = (node for node in tree.body if isinstance(node, ast.If))
    return [
        (str(it.module), name.name)
        for it in block.body
        if isinstance(it, ast.ImportFrom)
        for name in it.names
    ]


def test_the_kernel_package_offers_what_it_declares() -> None:
    names = typed_names()
    assert {name for _, name in names} == set(kernel._MODULES)
    for module, name in names:
        assert getattr(kernel, name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        kernel.missing  # type: ignore[attr-defined]  # noqa: B018
