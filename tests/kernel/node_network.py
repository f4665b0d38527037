"""A node between pods and outside hosts, in network namespaces, with servers that return their name and the client.

    client 203.0.113.10 ─┐            ┌─ pod1 10.244.1.11, pod2 10.244.1.12: on the node
                         ├─── node ───┤
    beyond 192.168.99.1 ─┘            └─ far 10.244.2.13: a pod elsewhere

"beyond" is the default gateway and answers for all addresses that no other host has, under the name of the address. All
hosts have IPv4 and IPv6. They listen on PORTS over TCP and UDP; over SCTP, on all ports, but the node on PORTS only.
"""

import contextlib
import errno
import os
import random
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from pyroute2 import netns

from pykubeproxy.kernel import Iptables
from pykubeproxy.lab.network import Namespace, lab_namespaces
from pykubeproxy.objects import Family
from tests.kernel import sctp
from tests.kernel.sctp import SctpPacket

PORTS = (53, 80, 8080, 9090)
NODE = {Family.IPV4: ("192.168.99.10", "203.0.113.1"), Family.IPV6: ("fd00:99::10", "2001:db8:113::1")}
CLIENT = {Family.IPV4: "203.0.113.10", Family.IPV6: "2001:db8:113::10"}
BEYOND = {Family.IPV4: "192.168.99.1", Family.IPV6: "fd00:99::1"}
PODS = {
    "pod1": {Family.IPV4: "10.244.1.11", Family.IPV6: "fd00:10:244:1::11"},
    "pod2": {Family.IPV4: "10.244.1.12", Family.IPV6: "fd00:10:244:1::12"},
    "far": {Family.IPV4: "10.244.2.13", Family.IPV6: "fd00:10:244:2::13"},
}
# Addresses that "beyond" answers for.
ANYWHERE = {
    Family.IPV4: ("10.96.0.0/16", "10.244.0.0/16", "192.0.2.0/24", "198.51.100.0/24"),
    Family.IPV6: (
        "fd00:10:96::/112",
        "fd00:10:244::/56",
        "2001:db8::/47",
        "2001:db8:2::/64",
        "2001:db8:51::/64",
    ),
}
_GATEWAY = {Family.IPV4: ("169.254.1.1", 32), Family.IPV6: ("fe80::1", 64)}
_DOMAIN = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_KINDS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM, "sctp": socket.SOCK_RAW}
# linux/in.h: IP_PKTINFO, which the socket module lacks before Python 3.14.
_PKTINFO = {
    Family.IPV4: (socket.IPPROTO_IP, 8, 8),
    Family.IPV6: (socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, socket.IPV6_PKTINFO),
}
# linux/in.h and linux/in6.h: IP_RECVERR, IPV6_RECVERR
_RECEIVE_ERRORS = {Family.IPV4: (socket.IPPROTO_IP, 11), Family.IPV6: (socket.IPPROTO_IPV6, 25)}
_IPV6_FREEBIND = 78
# Loading this without --noflush empties the tables.
_EMPTY = (
    "*mangle\nCOMMIT\n*nat\nCOMMIT\n"
    "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n"
)


class LinkedNode:
    """The network; a context manager."""

    def __init__(self, lab: str) -> None:
        self._lab = lab
        self.places: dict[str, Namespace] = {}
        self._servers = Servers()

    def __enter__(self) -> "LinkedNode":
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._servers.close()
        for place in self.places.values():
            place.close()
        for name in lab_namespaces(self._lab):
            netns.remove(name)

    def _build(self) -> None:
        for name in ("node", "client", "beyond", *PODS):
            self.places[name] = Namespace(self._lab, name)
        node = self.places["node"]
        node.forward()
        node.sysctl("net/ipv4/conf/all/route_localnet", "1")
        self._outside("client", "ext0", CLIENT, 1)
        self._outside("beyond", "eth0", BEYOND, 0)
        for name, addresses in PODS.items():
            self._pod(name, addresses)
        for family in Family:
            everywhere = "::/0" if family is Family.IPV6 else "0.0.0.0/0"
            node.route(everywhere, via=BEYOND[family])
            self.places["client"].route(everywhere, via=NODE[family][1])
            self.places["beyond"].route(everywhere, via=NODE[family][0])
            for cidr in ANYWHERE[family]:
                beyond = ("ip", "-n", self.places["beyond"].name)
                # Not in table local, which comes before the routes to the pods.
                local = ("route", "add", "local", cidr, "dev", "lo", "table", "main")
                subprocess.run((*beyond, *local), check=True)
            whole = 128 if family is Family.IPV6 else 32
            for pod in PODS.values():
                self.places["beyond"].route(f"{pod[family]}/{whole}", via=NODE[family][0])
        for name, place in self.places.items():
            with place.entered():
                self._servers.listen(name)
        self._servers.start()

    def _outside(self, name: str, interface: str, addresses: Mapping[Family, str], own: int) -> None:
        node, other = self.places["node"], self.places[name]
        node.veth(interface, other, "eth0")
        for family, length in ((Family.IPV4, 24), (Family.IPV6, 64)):
            node.address(interface, NODE[family][own], length)
            other.address("eth0", addresses[family], length)

    def _pod(self, name: str, addresses: Mapping[Family, str]) -> None:
        node, pod = self.places["node"], self.places[name]
        node.veth(name, pod, "eth0")
        for family, address in addresses.items():
            whole = 128 if family is Family.IPV6 else 32
            gateway, length = _GATEWAY[family]
            node.address(name, gateway, length, link_scope=True)
            node.route(f"{address}/{whole}", interface=name)
            pod.address("eth0", address, whole)
            pod.route("::/0" if family is Family.IPV6 else "0.0.0.0/0", via=gateway, interface="eth0")


class Servers:
    """A thread that answers on all sockets with "SERVER-NAME CLIENT-ADDRESS"."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def listen(self, name: str) -> None:
        """Open the sockets in the calling thread's namespace."""
        for family in Family:
            for port in PORTS:
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    self._selector.register(
                        _listening(family, kind, port), selectors.EVENT_READ, (name, family)
                    )
            raw = _listening(family, socket.SOCK_RAW, 0)
            self._selector.register(raw, selectors.EVENT_READ, (name, family))

    def start(self) -> None:
        self._selector.register(self._stop, selectors.EVENT_READ, ("", Family.IPV4))
        self._thread.start()

    def close(self) -> None:
        if self._thread.ident:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._stop)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._stop:
                    return
                assert isinstance(key.fileobj, socket.socket)
                name, family = key.data
                with contextlib.suppress(OSError):
                    _answer(key.fileobj, name, family)


def _opened(family: Family, kind: socket.SocketKind) -> socket.socket:
    """Open a socket; a raw one is for SCTP."""
    return socket.socket(_DOMAIN[family], kind, sctp.PROTOCOL if kind is socket.SOCK_RAW else 0)


def _listening(family: Family, kind: socket.SocketKind, port: int) -> socket.socket:
    opened = _opened(family, kind)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family is Family.IPV6 and kind is not socket.SOCK_RAW:
        opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if kind is not socket.SOCK_STREAM:
        level, ask, _ = _PKTINFO[family]
        opened.setsockopt(level, ask, 1)
        if family is Family.IPV6:
            # Else "beyond" could not answer from addresses that it only routes to itself.
            opened.setsockopt(level, _IPV6_FREEBIND, 1)
    opened.bind(("::" if family is Family.IPV6 else "0.0.0.0", port))
    opened.setblocking(False)
    if kind is socket.SOCK_STREAM:
        opened.listen(128)
    return opened


def _answer(server: socket.socket, name: str, family: Family) -> None:
    if server.type is socket.SOCK_STREAM:
        connection, peer = server.accept()
        with connection:
            who = connection.getsockname()[0] if name == "beyond" else name
            connection.sendall(f"{who} {peer[0]}".encode())
        return
    data, ancillary, _, peer = server.recvmsg(256, 256)
    level, _, packet_info = _PKTINFO[family]
    (info,) = (data for of, kind, data in ancillary if (of, kind) == (level, packet_info))
    # Answer from the address the packet was sent to, on any interface.
    info = info[:16] + bytes(4) if family is Family.IPV6 else bytes(4) + info[8:12] + bytes(4)
    own = info[:16] if family is Family.IPV6 else info[4:8]
    who = socket.inet_ntop(_DOMAIN[family], own) if name == "beyond" else name
    answer = f"{who} {peer[0]}".encode()
    if server.type is socket.SOCK_RAW:
        answer = _sctp_answer(_sctp(data, family), answer, name == "node")
        peer = peer[0], 0
    if answer:
        server.sendmsg([answer], [(level, packet_info, info)], 0, peer)


def _sctp(data: bytes, family: Family) -> SctpPacket:
    """Return a packet that a raw socket received; with IPv4, the IP header is in front of it."""
    return SctpPacket.decoded(data[(data[0] & 15) * 4 :] if family is Family.IPV4 else data)


def _sctp_answer(packet: SctpPacket, answer: bytes, only_ports: bool) -> bytes:
    """Return the answer to an INIT: an ABORT if it is for none of PORTS and `only_ports`; b"" to other packets."""
    if packet.kind != sctp.INIT:
        return b""
    back = packet.destination, packet.source, packet.initiate
    kind = sctp.ABORT if only_ports and packet.destination not in PORTS else sctp.INIT_ACK
    return SctpPacket(*back, kind, 1, answer).encoded()


def empty(tables: Iptables) -> None:
    """Delete all rules and connections of a node, and reset the policies."""
    outcome = tables.runner.run((tables.tools.restore,), _EMPTY)
    assert not outcome.exit_code, outcome.stderr
    tables.runner.run(("conntrack", "-F"))


class PacketSpec(NamedTuple):
    """A packet to send: source namespace and address, destination."""

    place: str
    source: str
    destination: str
    port: int
    protocol: str


@dataclass
class SentPacket:
    """A sent packet and its result: "pod1 10.244.1.12" (server and client address seen), or "refused".

    `own_port` and `tag` of SCTP are in the answer.
    """

    shot: PacketSpec
    socket: socket.socket
    result: str = ""
    connected: bool = field(default=False)
    own_port: int = 0
    tag: int = 0


def send_all(
    network: LinkedNode, packets: Mapping[PacketSpec, bool], silence: float = 0.4
) -> dict[PacketSpec, str]:
    """Send all packets at once; return each result, "" without an answer.

    A packet's value tells whether it may get no answer; then `silence` seconds are enough to wait.
    """
    flights = [_launched(network.places[shot.place], shot) for shot in packets]
    with selectors.DefaultSelector() as selector:
        for flight in flights:
            if not flight.result:
                ready = selectors.EVENT_WRITE if flight.shot.protocol == "tcp" else selectors.EVENT_READ
                selector.register(flight.socket, ready, flight)
        started = time.monotonic()
        while open_ := [key.data for key in selector.get_map().values()]:
            patience = silence if all(packets[flight.shot] for flight in open_) else 5.0
            if time.monotonic() > started + patience:
                break
            for key, _ in selector.select(0.05):
                _progress(selector, key.data)
    for flight in flights:
        flight.socket.close()
    return {flight.shot: flight.result for flight in flights}


def _launched(place: Namespace, shot: PacketSpec) -> SentPacket:
    family = Family.IPV6 if ":" in shot.destination else Family.IPV4
    with place.entered():
        opened = _opened(family, _KINDS[shot.protocol])
    flight = SentPacket(shot, opened)
    opened.setblocking(False)
    opened.bind((shot.source, 0))
    error = opened.connect_ex((shot.destination, 0 if shot.protocol == "sctp" else shot.port))
    if not error and shot.protocol != "tcp":
        sent = b"?"
        if shot.protocol == "sctp":
            opened.setsockopt(*_RECEIVE_ERRORS[family], 1)
            flight.own_port, flight.tag = random.randrange(32768, 61000), random.randrange(1, 1 << 32)
            sent = SctpPacket(flight.own_port, shot.port, 0, sctp.INIT, flight.tag).encoded()
        # Local processes get an error for dropped packets; others get no answer.
        with contextlib.suppress(PermissionError):
            opened.send(sent)
    if shot.protocol != "sctp" and error in (0, errno.EINPROGRESS):
        # An ICMP error may arrive during the call.
        error = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        flight.result = "refused" if error == errno.ECONNREFUSED else os.strerror(error)
    return flight


def _progress(selector: selectors.BaseSelector, flight: SentPacket) -> None:
    connection = flight.socket
    try:
        if flight.shot.protocol == "tcp" and not flight.connected:
            if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            flight.connected = True
            selector.modify(connection, selectors.EVENT_READ, flight)
            return
        if flight.shot.protocol == "sctp":
            if (packet := _received(flight)) is None:
                return
            flight.result = "refused" if packet.kind == sctp.ABORT else packet.cookie.decode()
        else:
            flight.result = connection.recv(256).decode() or "closed"
    except OSError as error:
        flight.result = "refused" if error.errno == errno.ECONNREFUSED else str(error)
    selector.unregister(connection)


def _received(flight: SentPacket) -> SctpPacket | None:
    """Return the answer to an SCTP packet, None if it is for another raw socket. Raises the error that is about it."""
    family = Family.IPV6 if ":" in flight.shot.destination else Family.IPV4
    try:
        packet = _sctp(flight.socket.recv(256), family)
    except OSError:
        # Errors about other packets to this address arrive too. The queue has the beginning of the packet.
        about = flight.socket.recvmsg(256, 256, socket.MSG_ERRQUEUE)[0]
        if int.from_bytes(about[:2], "big") == flight.own_port:
            raise
        return None
    return packet if (packet.destination, packet.verification) == (flight.own_port, flight.tag) else None


def sources(family: Family) -> Iterator[tuple[str, str]]:
    """Return the sending namespaces and their source addresses."""
    yield "client", CLIENT[family]
    yield from (("node", address) for address in NODE[family])
    yield from ((name, addresses[family]) for name, addresses in PODS.items())


def owner(family: Family, address: str) -> str:
    """Return the host that owns an address, and the address itself if "beyond" does."""
    hosts = {addresses[family]: name for name, addresses in {**PODS, "client": CLIENT}.items()}
    if address in NODE[family] or address.startswith("127."):
        return "node"
    return hosts.get(address, address)
