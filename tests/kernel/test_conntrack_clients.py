"""UDP clients that keep their source port, over real sockets, rules and conntrack entries."""

import time
from collections.abc import Iterator

import pytest

from pykubeproxy.kernel import Runner
from pykubeproxy.objects import Deleted, Family, Kind, Port, Protocol
from tests.fakes.waiting import eventually
from tests.kernel.flows import listed as entries
from tests.kernel.udp_node import NODE_PORT, OTHER_VIP, VIP, UdpNode, dns, listed, pods_of, udp_node

pytestmark = pytest.mark.root


@pytest.fixture
def node(family: Family, tmp_path: object) -> Iterator[UdpNode]:
    """A node with pods one and two and the services dns and other; other never changes."""
    with udp_node(family, Runner((), {"XTABLES_LOCKFILE": f"{tmp_path}/lock"})) as made:
        yield made


def flows(node: UdpNode, destination: str) -> list[str]:
    return [line for line in entries(node.runner, node.family) if f"dst={destination} " in line]


def test_client_reaches_replacement_pod(node: UdpNode) -> None:
    """By cluster IP and by node port, from the same source port."""
    node.sync(listed(dns(node.family)), pods_of(node, "pod1"))
    clients = [node.client(VIP[node.family]), node.client(node.node_address(), NODE_PORT)]
    assert all(client.reaches("pod1") for client in clients)
    started = time.monotonic()
    node.sync(pods_of(node, "pod2"))
    assert all(client.reaches("pod2") for client in clients)
    print(f"{time.monotonic() - started:.3f} s from the change until both clients reach the new pod")


def test_an_external_ip_of_another_service_keeps_no_client(node: UdpNode) -> None:
    """A Service claims the cluster IP as its external IP, with an endpoint at the address of the removed pod."""
    vip = VIP[node.family]
    claimant = dns(node.family, "claimant", external_ips=(vip,))
    node.sync(
        listed(dns(node.family), claimant), pods_of(node, "pod1"), pods_of(node, "pod1", service="claimant")
    )
    client = node.client(vip)
    assert client.reaches("pod1")
    node.sync(pods_of(node, "pod2"))
    assert client.reaches("pod2")


@pytest.mark.parametrize("claimed_by", [(), ("pod2",)], ids=["no endpoint", "no local endpoint"])
def test_an_external_ip_that_is_a_node_address_disturbs_no_client_of_a_node_port(
    node: UdpNode, claimed_by: tuple[str, ...]
) -> None:
    """Its policy is Local, so its rule lets packets of clients pass on to the node port with the same number."""
    ports = (Port("dns", Protocol.UDP, NODE_PORT),)
    claimant = dns(
        node.family, "claimant", external_ips=(node.node_address(),), ports=ports, external_local=True
    )
    node.sync(listed(dns(node.family), claimant), pods_of(node, "pod1"))
    eventually(lambda: len(node.cleaned) == 1)
    client = node.client(node.node_address(), NODE_PORT)
    assert client.reaches("pod1")
    node.sync(
        pods_of(node, *claimed_by, service="claimant"),
        listed(dns(node.family), claimant, dns(node.family, "other")),
    )
    eventually(lambda: len(node.cleaned) == 2)
    assert node.cleaned[1] == 0
    assert client.reaches("pod1")


def test_service_scaled_to_zero_and_back(node: UdpNode) -> None:
    """Without pods the client is refused at once; it reaches the first new pod."""
    node.sync(listed(dns(node.family)), pods_of(node, "pod1"))
    client = node.client(VIP[node.family])
    assert client.reaches("pod1")
    node.sync(pods_of(node))
    eventually(lambda: not flows(node, VIP[node.family]))
    assert client.ask() == ""
    node.sync(pods_of(node, "pod2"))
    assert client.reaches("pod2")


def test_client_older_than_the_service(node: UdpNode) -> None:
    """A client whose packets had no NAT reaches a service created later."""
    node.sync(listed(dns(node.family, "other")), pods_of(node, "pod1", service="other"))
    clients = [node.client(VIP[node.family]), node.client(node.node_address(), NODE_PORT)]
    assert [client.ask() for client in clients] == ["", ""]
    assert flows(node, VIP[node.family])
    assert flows(node, node.node_address())
    node.sync(listed(dns(node.family), dns(node.family, "other")), pods_of(node, "pod1"))
    assert all(client.reaches("pod1") for client in clients)


def test_deleted_service_loses_its_flows(node: UdpNode) -> None:
    """Flows of other services and straight to pods stay."""
    node.sync(
        listed(dns(node.family), dns(node.family, "other")),
        pods_of(node, "pod1"),
        pods_of(node, "pod1", service="other"),
    )
    pod = node.address("pod1")
    clients = [node.client(address) for address in (VIP[node.family], OTHER_VIP[node.family], pod)]
    clients.append(node.client(node.node_address(), NODE_PORT))
    assert all(client.reaches("pod1") for client in clients)
    node.sync(Deleted(Kind.SERVICE, dns(node.family).key))
    eventually(lambda: not flows(node, VIP[node.family]) and not flows(node, node.node_address()))
    assert flows(node, OTHER_VIP[node.family])
    assert any(f"sport={clients[2].port}" in line for line in flows(node, pod))


def test_other_clients_keep_their_flows(node: UdpNode) -> None:
    """When one of two pods goes, flows to the other, TCP and other services stay."""
    node.sync(
        listed(dns(node.family), dns(node.family, "other")),
        pods_of(node, "pod1", "pod2"),
        pods_of(node, "pod1", service="other"),
    )
    clients = [node.client(VIP[node.family]) for _ in range(12)]
    of_one = {client.port for client in clients if client.ask() == "pod1"}
    other = node.client(OTHER_VIP[node.family])
    assert other.reaches("pod1")
    assert 0 < len(of_one) < len(clients)
    eventually(lambda: len(node.cleaned) == 1)
    node.sync(pods_of(node, "pod2"))
    eventually(lambda: len(node.cleaned) == 2)
    left = {int(line.split("sport=")[1].split()[0]) for line in flows(node, VIP[node.family])}
    assert left == {client.port for client in clients} - of_one
    assert node.cleaned[-1] == len(of_one)
    assert flows(node, OTHER_VIP[node.family])


def test_service_deleted_while_the_agent_was_down(node: UdpNode) -> None:
    """After a restart, only flows of the deleted service are deleted."""
    both = dns(node.family), dns(node.family, "other")
    node.sync(listed(*both), pods_of(node, "pod1"), pods_of(node, "pod1", service="other"))
    clients = [node.client(VIP[node.family]), node.client(node.node_address(), NODE_PORT)]
    other = node.client(OTHER_VIP[node.family])
    assert all(client.reaches("pod1") for client in (*clients, other))
    node.start()
    node.sync(listed(both[1]))
    eventually(lambda: not flows(node, VIP[node.family]) and not flows(node, node.node_address()))
    assert flows(node, OTHER_VIP[node.family])


def test_sync_without_udp_change_reads_no_flows(node: UdpNode) -> None:
    """Syncs that change no UDP service do not read the table."""
    node.sync(listed(dns(node.family)), pods_of(node, "pod1"))
    eventually(lambda: len(node.cleaned) == 1)
    node.sync()
    node.sync(pods_of(node, "pod1"))
    node.sync(pods_of(node, "pod2"))
    eventually(lambda: len(node.cleaned) == 2)
