"""Completion of the plugin's arguments, as kubectl requests it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubeproxy.cli.completion import main
from pykubeproxy.cli.completion import plugin_completions as completions
from tests.fakes.cluster import service
from tests.fakes.remote_nodes import RemoteNodes


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteNodes]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with RemoteNodes(tmp_path) as running:
        for name in ("node1", "node2", "other"):
            running.node(name)
        running.api.store.create(service("web"))
        running.api.store.create(service("db") | {"metadata": {"name": "db", "namespace": "shop"}})
        yield running


def test_commands_have_descriptions() -> None:
    (check,) = (it for it in completions([], "che") if it.startswith("check"))
    assert check == "check\tCheck the proxies of nodes, and print what to do about problems."


def test_last_line_is_the_directive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """:4 rules out names of files, :0 asks for them."""
    monkeypatch.setattr("sys.argv", ["kubectl_complete-pykubeproxy", "status", "-o", ""])
    main()
    assert capsys.readouterr().out == "text\nwide\njson\nyaml\nname\n:4\n"
    assert completions(["status", "--kubeconfig"], "/tmp/") == [":0"]


def test_nodes(cluster: RemoteNodes) -> None:
    assert completions(["status", "--node"], "node") == ["node1", "node2", ":4"]


def test_services(cluster: RemoteNodes) -> None:
    assert completions(["dump-rules", "--node", "node1"], "") == ["default/web", "shop/db", ":4"]
    assert completions(["dump-rules", "-n", "shop"], "") == ["db", ":4"]
    assert completions(["dump-rules", "-n"], "s") == ["shop", ":4"]


def test_cluster_that_cannot_be_asked(cluster: RemoteNodes) -> None:
    """Completion prints no errors."""
    assert completions(["status", "--context", "missing", "--node"], "") == [":4"]


def test_ends_of_a_connection(cluster: RemoteNodes) -> None:
    """Pods and nodes of the cluster, and for the destination Services and their ports."""
    cluster.pod("p1", "node1")
    assert completions(["trace"], "po") == ["pod/kube-system/p1", ":4"]
    assert completions(["trace"], "node/o") == ["node/other", ":4"]
    assert completions(["trace", "pod/kube-system/p1"], "svc/sh") == ["svc/shop/db", ":4"]
