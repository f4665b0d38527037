"""UDP clients that keep their source port, with an agent between an API server and the kernel."""

from collections.abc import Iterator
from typing import Any

import pytest

from pykubeproxy.kernel import Runner
from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, SERVICES, ApiServer
from pykubeproxy.objects import Family
from tests.fakes.cluster import node as node_object
from tests.fakes.cluster import server, service, slice_of
from tests.fakes.process import HEALTH, answers, metric, running
from tests.fakes.waiting import eventually
from tests.kernel.udp_node import NODE_PORT, PORT, VIP, UdpNode, udp_node

pytestmark = pytest.mark.root

SYNCS = 'kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"}'


@pytest.fixture(scope="module")
def running_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiServer, UdpNode]]:
    """An API server with the service and an agent on a node; the tests run on the node, too."""
    folder = tmp_path_factory.mktemp("udp")
    lock = {"XTABLES_LOCKFILE": str(folder / "lock")}
    with (
        udp_node(Family.IPV4, Runner((), lock)) as node,
        node.node.entered(),
        server() as api,
    ):
        api.store.create(node_object("node1", node.node_address()))
        ports = [{"port": PORT, "protocol": "UDP", "nodePort": NODE_PORT}]
        api.store.create(service("dns", type="NodePort", clusterIP=VIP[Family.IPV4], ports=ports))
        api.store.create(dns(node, "pod1"))
        flags = ("--master", api.url, "--hostname-override=node1", "--iptables-backend=nft")
        with running(folder / "agent.log", *flags, environment=lock):
            eventually(lambda: answers(HEALTH, "/readyz", 200))
            yield api, node


@pytest.fixture
def node(running_node: tuple[ApiServer, UdpNode]) -> UdpNode:
    return running_node[1]


@pytest.fixture
def api(running_node: tuple[ApiServer, UdpNode]) -> ApiServer:
    """The API server, whose service has the pod "pod1"."""
    api, node = running_node
    scale(api, node, "pod1")
    assert node.client(VIP[Family.IPV4]).reaches("pod1")
    return api


def dns(node: UdpNode, *pods: str) -> dict[str, Any]:
    made = slice_of("dns", *(node.address(pod) for pod in pods))
    return {**made, "ports": [{"port": PORT, "protocol": "UDP"}]}


def scale(api: ApiServer, node: UdpNode, *pods: str) -> None:
    """Set the pods of the service."""
    api.store.merge_patch(ENDPOINT_SLICES, "default", "dns", {"endpoints": dns(node, *pods)["endpoints"]})


@pytest.mark.parametrize("by_node_port", [False, True], ids=["cluster IP", "node port"])
def test_clients_reach_a_replacement_pod_within_one_sync(
    api: ApiServer, node: UdpNode, by_node_port: bool
) -> None:
    """Although they never stop sending."""
    client = node.client(node.node_address(), NODE_PORT) if by_node_port else node.client(VIP[Family.IPV4])
    assert client.reaches("pod1")
    before = metric(SYNCS)
    scale(api, node, "pod2")
    assert client.reaches("pod2")
    assert metric(SYNCS) == before + 1
    eventually(lambda: metric("kubeproxy_conntrack_reconciler_deleted_entries_total") >= 1)
    assert metric("kubeproxy_conntrack_reconciler_sync_duration_seconds_count") >= 1


def test_clients_reach_a_service_scaled_to_zero_and_back(api: ApiServer, node: UdpNode) -> None:
    """They are rejected in between."""
    client = node.client(VIP[Family.IPV4])
    assert client.reaches("pod1")
    scale(api, node)
    assert client.reaches("")
    for _ in range(5):
        assert client.ask() == ""
    scale(api, node, "pod2")
    assert client.reaches("pod2")


def test_clients_older_than_the_service_reach_it(api: ApiServer, node: UdpNode) -> None:
    """Their old flow without NAT is deleted."""
    api.store.delete(SERVICES, "default", "dns")
    client = node.client(VIP[Family.IPV4])
    eventually(lambda: client.ask() == "")
    ports = [{"port": PORT, "protocol": "UDP"}]
    api.store.create(service("dns", clusterIP=VIP[Family.IPV4], ports=ports))
    assert client.reaches("pod1")


def test_clients_from_a_time_without_rules_reach_the_service(api: ApiServer, node: UdpNode) -> None:
    """Another program deletes rules; until their repair, packets get no DNAT."""
    client = node.client(VIP[Family.IPV4])
    node.runner.run(("iptables-nft", "-t", "nat", "-F", "KUBE-SERVICES"))
    assert client.ask() == ""
    assert client.reaches("pod1")
