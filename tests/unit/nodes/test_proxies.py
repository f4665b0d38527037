"""Which pod and which container of a node run its proxy."""

import pytest

from pykubeproxy.nodes.proxies import find_other_proxies, find_proxies, version_of
from pykubeproxy.sources import Client, wire
from tests.fakes.remote_nodes import AGENT, RemoteNodes


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("registry.example/kube-proxy:v1.35.1", "v1.35.1"),
        ("registry.example:5000/team/kube-proxy:v1.35.1-eksbuild.2@sha256:00ff", "v1.35.1-eksbuild.2"),
        ("registry.example:5000/kube-proxy@sha256:00ff", ""),
        ("kube-proxy", ""),
    ],
)
def test_version_is_the_tag_of_the_image(image: str, version: str) -> None:
    assert version_of(image) == version


def test_running_pod_comes_before_others(cluster: RemoteNodes, client: Client) -> None:
    """As while a DaemonSet is rolled out, or moved from kube-proxy to ours."""
    cluster.pod("old", "n1", phase="Failed", ready=False)
    cluster.pod("waits", "n1", ready=False)
    cluster.pod("serves", "n1")
    cluster.pod("ours", "n1", AGENT, phase="Pending", ready=False, container="agent")
    found = find_proxies(client)["n1"]
    assert [it.pod.name for it in found] == ["serves", "waits", "ours", "old"]


def test_pods_of_one_node(cluster: RemoteNodes, client: Client) -> None:
    cluster.pod("p1", "n1")
    cluster.pod("p2", "n2")
    assert list(find_proxies(client, node="n2")) == ["n2"]


def test_pages_of_a_long_list(cluster: RemoteNodes, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PAGE_SIZE", 2)
    for number in range(5):
        cluster.pod(f"p{number}", f"n{number}")
    assert sorted(find_proxies(client)) == [f"n{number}" for number in range(5)]


def test_container_of_our_manifests(cluster: RemoteNodes, client: Client) -> None:
    cluster.pod("ours", "n1", AGENT, container="agent", image="pykubeproxy:0.1.0")
    (proxy,) = find_proxies(client)["n1"]
    assert (str(proxy), proxy.ours, proxy.container.name) == ("pykubeproxy 0.1.0", True, "agent")


@pytest.mark.parametrize("selector", ["", "k8s-app=kube-proxy"])
def test_pod_with_the_labels_in_a_namespace_of_a_tenant_is_not_asked(
    cluster: RemoteNodes, client: Client, selector: str
) -> None:
    """Even if the proxy itself does not run, or has no pod."""
    cluster.pod("a", "n1", namespace="tenant")
    cluster.pod("b", "n2", namespace="tenant")
    cluster.pod("serves", "n1", phase="Pending", ready=False)
    found = find_proxies(client, pod_selector=selector)
    assert {node: [str(it.pod) for it in some] for node, some in found.items()} == {
        "n1": ["kube-system/serves"]
    }


@pytest.mark.parametrize("selector", ["", "k8s-app=kube-proxy"])
def test_pod_without_the_network_of_its_node_is_no_proxy(
    cluster: RemoteNodes, client: Client, selector: str
) -> None:
    """A proxy needs that network; a tenant may not have it."""
    cluster.pod("a", "n1", namespace="proxies", host_network=False)
    cluster.pod("b", "n2", namespace="proxies")
    assert [*find_proxies(client, pod_selector=selector, namespace="proxies")] == ["n2"]


def test_pod_of_a_tenant_is_no_other_proxy(cluster: RemoteNodes, client: Client) -> None:
    cluster.pod("a", "n1", {"k8s-app": "cilium"}, namespace="tenant", host_network=False)
    cluster.pod("b", "n2", {"k8s-app": "cilium"}, namespace="cilium")
    assert find_other_proxies(client, ["n1", "n2"]) == {"n2": "Cilium"}
