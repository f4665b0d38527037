"""A node whose agent cleans flows, and a UDP client that keeps its source port, in the network of node_network.py."""

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator

import msgspec

from pykubeproxy.agent.flow_cleaner import FlowCleaner
from pykubeproxy.kernel import Backend, Runner, open_iptables
from pykubeproxy.objects import EndpointPort, Event, Family, Kind, Listed, Port, Protocol, Service, Updated
from tests.fakes.synced import SyncedFamily
from tests.fakes.waiting import PATIENCE
from tests.kernel.node_network import NODE, PODS, LinkedNode
from tests.objects import service, slice_of

# No other host has these addresses, so packets to them get no answer without rules.
VIP = {Family.IPV4: "10.97.0.53", Family.IPV6: "fd97::53"}
OTHER_VIP = {Family.IPV4: "10.97.0.54", Family.IPV6: "fd97::54"}
_DOMAIN = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
PORT, NODE_PORT = 53, 30053


class UdpNode:
    """A node with tables and a running flow cleaner."""

    def __init__(
        self, family: Family, network: LinkedNode, stack: contextlib.ExitStack, runner: Runner
    ) -> None:
        self.family = family
        self.node = network.places["node"]
        self._client = network.places["client"]
        self._stack = stack
        self.cleaned: list[int] = []
        self.runner = Runner(("ip", "netns", "exec", self.node.name), runner.environment)
        self._synced = SyncedFamily(live=open_iptables(Backend.NFT, family, self.runner))
        self.start()

    def address(self, pod: str) -> str:
        return PODS[pod][self.family]

    def start(self) -> None:
        """Replace the agent by a new one that knows only the current objects."""
        self._synced.restart()
        self._cleaner = FlowCleaner(4, lambda *args: self.cleaned.append(args[2]))
        with self.node.entered():
            threading.Thread(target=self._cleaner.run, daemon=True).start()

    def sync(self, *events: Event) -> None:
        """Apply these events in one sync."""
        self._cleaner.notice(self._synced.sync(*events))

    def client(self, destination: str, port: int = PORT) -> "Client":
        """Return a client with its own source port."""
        with self._client.entered():
            return self._stack.enter_context(Client(_DOMAIN[self.family], destination, port))

    def node_address(self) -> str:
        """Return the node's address on the client's link."""
        return NODE[self.family][1]


class Client:
    """A UDP socket with one source port and one destination."""

    def __init__(self, domain: int, destination: str, port: int) -> None:
        self._socket = socket.socket(domain, socket.SOCK_DGRAM)
        self._socket.connect((destination, port))
        self.port = self._socket.getsockname()[1]

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, seconds: float = 0.3) -> str:
        """Send a packet; return the name of the answering pod, "" without an answer."""
        self._socket.settimeout(seconds)
        with contextlib.suppress(OSError):
            self._socket.send(b"who?")
            return self._socket.recv(100).decode().split()[0]
        return ""

    def reaches(self, pod: str) -> bool:
        """Return whether that pod answers in time."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.ask() == pod:
                return True
        return False


def dns(family: Family, name: str = "dns", **fields: object) -> Service:
    """Return the Service of the pods; `other` has another address."""
    vip = (VIP if name == "dns" else OTHER_VIP)[family]
    ports = (Port("dns", Protocol.UDP, PORT, NODE_PORT if name == "dns" else 0),)
    return service(name, cluster_ip=vip, **{"type": "NodePort", "ports": ports, **fields})


def listed(*services: Service) -> Listed:
    return Listed(Kind.SERVICE, services)


def pods_of(node: UdpNode, *pods: str, service: str = "dns") -> Updated:
    """Return the EndpointSlice of a service with these pods."""
    made = slice_of(
        *(node.address(pod) for pod in pods),
        service=service,
        name=service,
        ports=(EndpointPort("dns", Protocol.UDP, PORT),),
    )
    return Updated(msgspec.structs.replace(made, family=node.family))


@contextlib.contextmanager
def udp_node(family: Family, runner: Runner) -> Iterator[UdpNode]:
    with LinkedNode(f"u{uuid.uuid4().hex[:8]}") as network, contextlib.ExitStack() as stack:
        yield UdpNode(family, network, stack, runner)
