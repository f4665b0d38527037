"""The kubernetes client library against the server, by its kubeconfig."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes
import kubernetes.stream
import pytest

from pykubeproxy.lab.apiserver import SERVICES, ApiServer, Sandbox
from tests.unit.lab.apiserver.conftest import Maker


@pytest.fixture
def core(server: ApiServer, tmp_path: Path) -> Iterator[Any]:
    server.token = "secret"
    kubernetes_client = kubernetes.config.new_client_from_config(str(server.kubeconfig(tmp_path / "config")))
    yield kubernetes.client.CoreV1Api(kubernetes_client)
    kubernetes_client.close()


def test_list_patch_and_delete(server: ApiServer, core: Any, service: Maker) -> None:
    """Typed lists, a merge patch, and errors that the library understands."""
    server.store.load([service("a"), service("b", labels={"x": "y"})])
    listed = core.list_service_for_all_namespaces(label_selector="x=y")
    assert [item.metadata.name for item in listed.items] == ["b"]
    assert listed.items[0].spec.cluster_ip == "10.96.1.2"
    patched = core.api_client.call_api(
        "PATCH",
        f"{server.url}/api/v1/namespaces/default/services/a",
        header_params={
            "Content-Type": "application/merge-patch+json",
            "Authorization": "Bearer secret",
        },
        body={"spec": {"type": "NodePort"}},
    )
    assert patched.status == 200
    assert core.read_namespaced_service("a", "default").spec.ports[0].node_port == 30086
    core.delete_namespaced_service("a", "default")
    with pytest.raises(kubernetes.client.ApiException) as missing:
        core.read_namespaced_service("a", "default")
    assert missing.value.status == 404


def test_pages(server: ApiServer, core: Any, service: Maker) -> None:
    """The library's limit and continue walk through everything."""
    server.store.load(service(f"s{number}") for number in range(7))
    names, token = [], None
    while True:
        page = core.list_service_for_all_namespaces(limit=3, _continue=token)
        names += [item.metadata.name for item in page.items]
        token = page.metadata._continue
        if not token:
            break
    assert names == [f"s{number}" for number in range(7)]


def test_watch(server: ApiServer, core: Any, service: Maker) -> None:
    """watch.Watch sees what there is and what happens."""
    server.store.create(service("a"))

    def change() -> None:
        server.store.create(service("b"))
        server.store.merge_patch(SERVICES, "default", "b", {"metadata": {"labels": {"x": "y"}}})
        server.store.delete(SERVICES, "default", "a")

    seen: list[tuple[str, str]] = []
    stream = kubernetes.watch.Watch()
    for event in stream.stream(core.list_service_for_all_namespaces, timeout_seconds=10):
        if not seen:
            threading.Thread(target=change).start()
        seen.append((event["type"], event["object"].metadata.name))
        if len(seen) == 4:
            stream.stop()
    assert seen == [("ADDED", "a"), ("ADDED", "b"), ("MODIFIED", "b"), ("DELETED", "a")]


def test_watch_from_a_version_that_is_gone(server: ApiServer, core: Any, service: Maker) -> None:
    """The library raises the 410 that comes as an event."""
    server.store.load(service(f"s{number}") for number in range(3))
    server.store.compact()
    with pytest.raises(kubernetes.client.ApiException) as gone:
        for _ in kubernetes.watch.Watch().stream(
            core.list_service_for_all_namespaces, resource_version="2", timeout_seconds=5
        ):
            pass
    assert gone.value.status == 410


def test_wrong_token(server: ApiServer, tmp_path: Path) -> None:
    """Without the right token the library gets a 401; the token may change while the server runs."""
    with ApiServer(token="first") as guarded:
        loaded = kubernetes.config.new_client_from_config(str(guarded.kubeconfig(tmp_path / "config")))
        core = kubernetes.client.CoreV1Api(loaded)
        assert core.list_node().items == []
        guarded.token = "second"
        with pytest.raises(kubernetes.client.ApiException) as refused:
            core.list_node()
        assert refused.value.status == 401
        loaded.close()


def test_exec(tmp_path: Path, node: Maker, pod: Maker) -> None:
    """The library's stream gets both outputs and the exit code, and closes the input."""
    with ApiServer(token="secret", runtime=lambda _: Sandbox()) as running:
        running.store.create(node("n1"))
        running.store.create(pod("web"))
        loaded = kubernetes.config.new_client_from_config(str(running.kubeconfig(tmp_path / "config")))
        execute = kubernetes.client.CoreV1Api(loaded).connect_get_namespaced_pod_exec
        options = {"stdin": True, "stdout": True, "stderr": True, "_preload_content": False}
        script = "cat; echo problem >&2; exit 4"
        session = kubernetes.stream.stream(execute, "web", "default", command=["sh", "-c", script], **options)
        session.write_stdin("hello")
        session.close_channel(0)
        session.run_forever(timeout=10)
        assert (session.read_stdout(), session.read_stderr()) == ("hello", "problem\n")
        assert session.returncode == 4
        with pytest.raises(kubernetes.client.ApiException) as missing:
            kubernetes.stream.stream(execute, "none", "default", command=["id"], stdout=True)
        assert "Handshake status 404" in str(missing.value)
        loaded.close()
