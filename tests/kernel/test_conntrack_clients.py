"""UDP clients that keep their source port, over real sockets, rules and conntrack entries."""

import time
from collections.abc import Callable, Iterator

import pytest

from pykubeproxy.kernel import Runner
from pykubeproxy.objects import Deleted, Family, Kind
from tests.kernel.flows import listed as entries
from tests.kernel.udp_node import NODE_PORT, OTHER_VIP, VIP, UdpNode, dns, listed, pods_of, udp_node

pytestmark = pytest.mark.root


@pytest.fixture
def node(family: Family, tmp_path: object) -> Iterator[UdpNode]:
    """A node with the pods one and two, and both services known: dns, and other, which nobody asks for changes."""
    with udp_node(family, Runner((), {"XTABLES_LOCKFILE": f"{tmp_path}/lock"}), "one", "two") as made:
        yield made


def wait(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def flows(node: UdpNode, destination: str) -> list[str]:
    return [line for line in entries(node.runner, node.family) if f"dst={destination} " in line]


def test_replaced_pod(node: UdpNode) -> None:
    """After its pod was replaced a client reaches the new one, by cluster IP and by node port."""
    node.sync(listed(dns(node.family)), pods_of(node, "one"))
    clients = [node.client(VIP[node.family]), node.client(node.node_address(), NODE_PORT)]
    assert all(client.reaches("one") for client in clients)
    started = time.monotonic()
    node.sync(pods_of(node, "two"))
    assert all(client.reaches("two") for client in clients)
    print(f"{time.monotonic() - started:.3f} s from the change until both clients reach the new pod")


def test_scaled_to_none_and_back(node: UdpNode) -> None:
    """With no pod left the client is refused instead of left waiting; it reaches the first one that comes."""
    node.sync(listed(dns(node.family)), pods_of(node, "one"))
    client = node.client(VIP[node.family])
    assert client.reaches("one")
    node.sync(pods_of(node))
    wait(lambda: not flows(node, VIP[node.family]))
    assert client.ask() == ""
    node.sync(pods_of(node, "two"))
    assert client.reaches("two")


def test_client_was_there_before_the_service(node: UdpNode) -> None:
    """A client whose packets went astray, undirected, before there was a service gets through once there is one."""
    node.sync(listed(dns(node.family, "other")), pods_of(node, "one", service="other"))
    clients = [node.client(VIP[node.family]), node.client(node.node_address(), NODE_PORT)]
    assert [client.ask() for client in clients] == ["", ""]
    assert flows(node, VIP[node.family])
    assert flows(node, node.node_address())
    node.sync(listed(dns(node.family), dns(node.family, "other")), pods_of(node, "one"))
    assert all(client.reaches("one") for client in clients)


def test_service_deleted(node: UdpNode) -> None:
    """Flows of a deleted service go; those of another, and straight to a pod, stay."""
    node.sync(
        listed(dns(node.family), dns(node.family, "other")),
        pods_of(node, "one"),
        pods_of(node, "one", service="other"),
    )
    pod = node.address("one")
    clients = [node.client(it) for it in (VIP[node.family], OTHER_VIP[node.family], pod)]
    clients.append(node.client(node.node_address(), NODE_PORT))
    assert all(client.reaches("one") for client in clients)
    node.sync(Deleted(Kind.SERVICE, dns(node.family).key))
    wait(lambda: not flows(node, VIP[node.family]) and not flows(node, node.node_address()))
    assert flows(node, OTHER_VIP[node.family])
    assert any(f"sport={clients[2].port}" in line for line in flows(node, pod))


def test_other_clients_are_not_disturbed(node: UdpNode) -> None:
    """When one of two pods goes, only its flows go; the other's, TCP and other services' stay as they are."""
    node.sync(
        listed(dns(node.family), dns(node.family, "other")),
        pods_of(node, "one", "two"),
        pods_of(node, "one", service="other"),
    )
    clients = [node.client(VIP[node.family]) for _ in range(12)]
    of_one = {it.port for it in clients if it.ask() == "one"}
    other = node.client(OTHER_VIP[node.family])
    assert other.reaches("one")
    assert 0 < len(of_one) < len(clients)
    wait(lambda: len(node.cleaned) == 1)
    node.sync(pods_of(node, "two"))
    wait(lambda: len(node.cleaned) == 2)
    left = {int(line.split("sport=")[1].split()[0]) for line in flows(node, VIP[node.family])}
    assert left == {it.port for it in clients} - of_one
    assert node.cleaned[-1] == len(of_one)
    assert flows(node, OTHER_VIP[node.family])


def test_service_deleted_while_nobody_was_running(node: UdpNode) -> None:
    """A process that finds the rules of a service that is no more deletes its flows, and those of no other."""
    both = dns(node.family), dns(node.family, "other")
    node.sync(listed(*both), pods_of(node, "one"), pods_of(node, "one", service="other"))
    clients = [node.client(VIP[node.family]), node.client(node.node_address(), NODE_PORT)]
    other = node.client(OTHER_VIP[node.family])
    assert all(client.reaches("one") for client in (*clients, other))
    node.start()
    node.sync(listed(both[1]))
    wait(lambda: not flows(node, VIP[node.family]) and not flows(node, node.node_address()))
    assert flows(node, OTHER_VIP[node.family])


def test_nothing_is_listed_without_a_change(node: UdpNode) -> None:
    """Syncs that change no UDP service do not look at the table."""
    node.sync(listed(dns(node.family)), pods_of(node, "one"))
    wait(lambda: len(node.cleaned) == 1)
    node.sync()
    node.sync(pods_of(node, "one"))
    node.sync(pods_of(node, "two"))
    wait(lambda: len(node.cleaned) == 2)
