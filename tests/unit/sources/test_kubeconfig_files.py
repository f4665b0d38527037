"""Several kubeconfigs, merged as `kubectl config view` of kubectl 1.36 shows them."""

from pathlib import Path

import pytest
import yaml

from pykubeproxy.sources import SourceError, credential_store
from pykubeproxy.sources.kubeconfig import Kubeconfigs
from pykubeproxy.sources.kubeconfig_files import context_namespace, read_merged, user_kubeconfigs

FIRST = """
clusters: [{name: c, cluster: {server: "https://a:1", certificate-authority: ca.pem}}]
users: [{name: u, user: {token: a}}]
contexts: [{name: x1, context: {cluster: c, user: u}}]
"""
SECOND = """
current-context: y1
clusters:
- {name: c, cluster: {server: "https://b:1", proxy-url: "http://p:1"}}
- {name: d, cluster: {server: "https://d:1", certificate-authority: ca.pem}}
users:
- {name: u, user: {token: b, tokenFile: tok}}
- {name: v, user: {exec: {command: ./plug, apiVersion: client.authentication.k8s.io/v1}}}
contexts:
- {name: x1, context: {cluster: d, user: v, namespace: nb}}
- {name: y1, context: {cluster: c, user: v, namespace: ny}}
"""


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, ...]:
    """Two kubeconfigs in folders of their own, and one that is missing."""
    for name, text in (("a", FIRST), ("b", SECOND)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config").write_text(text)
    return tuple(str(tmp_path / name / "config") for name in ("a", "b", "missing"))


def test_first_file_wins_with_whole_entries(paths: tuple[str, ...]) -> None:
    """Paths are relative to the file that names them."""
    merged = read_merged(Kubeconfigs(paths))
    first, second = (Path(it).parent for it in paths[:2])
    assert merged["current-context"] == "y1"
    assert [it["cluster"] for it in merged["clusters"]] == [
        {"server": "https://a:1", "certificate-authority": str(first / "ca.pem")},
        {"server": "https://d:1", "certificate-authority": str(second / "ca.pem")},
    ]
    assert [it["user"] for it in merged["users"]] == [
        {"token": "a"},
        {"exec": {"command": str(second / "plug"), "apiVersion": "client.authentication.k8s.io/v1"}},
    ]
    assert [it["context"].get("namespace") for it in merged["contexts"]] == [None, "ny"]


def test_context_selects_cluster_and_user(paths: tuple[str, ...]) -> None:
    loaded = credential_store.load(Kubeconfigs((paths[0],), "x1"), "http://plain:1")
    assert loaded.server.url == "http://plain:1"
    with pytest.raises(SourceError, match="it has no context 'x2'"):
        credential_store.load(Kubeconfigs(paths, "x2"), "")


def test_namespace_is_that_of_the_context(paths: tuple[str, ...]) -> None:
    assert context_namespace(Kubeconfigs(paths)) == "ny"
    assert context_namespace(Kubeconfigs(paths, "x1")) == ""


def test_order_of_places(paths: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option, then the environment, then the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    several = {"KUBECONFIG": f"{paths[1]}::{paths[2]}:{paths[1]}"}
    assert user_kubeconfigs(paths[0], "x1", several) == Kubeconfigs((paths[0],), "x1")
    assert user_kubeconfigs("", "", several) == Kubeconfigs((paths[1], paths[2]))
    assert user_kubeconfigs("", "", {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}) is None
    home = tmp_path / ".kube" / "config"
    home.parent.mkdir()
    home.write_text(yaml.safe_dump({}))
    assert user_kubeconfigs("", "", {"KUBECONFIG": ""}) == Kubeconfigs((str(home),))


def test_files_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the user names must exist; in a pod without any, the service account counts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SourceError, match="kubeconfig /no/file does not exist"):
        user_kubeconfigs("/no/file", "", {})
    with pytest.raises(SourceError, match="KUBECONFIG names no file that exists: /no/file"):
        user_kubeconfigs("", "", {"KUBECONFIG": "/no/file"})
    with pytest.raises(SourceError, match="there is no kubeconfig; set"):
        user_kubeconfigs("", "", {})
    with pytest.raises(SourceError, match="there is no kubeconfig; set"):
        user_kubeconfigs("", "x1", {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})


def test_file_that_is_no_kubeconfig(tmp_path: Path) -> None:
    path = tmp_path / "config"
    for text in ("- a\n", "a: [\n", "contexts: [{name: x, context: 5}]\ncurrent-context: x\n"):
        path.write_text(text)
        with pytest.raises(SourceError):
            context_namespace(Kubeconfigs((str(path),)))
        with pytest.raises(SourceError):
            credential_store.load(Kubeconfigs((str(path),)), "")
