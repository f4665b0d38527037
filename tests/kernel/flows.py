"""Create and list entries of the connection tracking table."""

import ipaddress
import socket
import struct

from pykubeproxy.kernel import Runner, netlink
from pykubeproxy.objects import Family

NESTED = 0x8000
NETLINK_NETFILTER = 12
# A client and a service address of each family.
CLIENT = {Family.IPV4: "10.1.0.1", Family.IPV6: "fd01::1"}
VIP = {Family.IPV4: "10.96.0.10", Family.IPV6: "fd96::10"}
POD = {Family.IPV4: "10.244.0.5", Family.IPV6: "fd24::5"}


def insert(
    runner: Runner,
    source: str,
    destination: str,
    answered_by: str = "",
    protocol: str = "udp",
    zone: int = 0,
    state: str = "ESTABLISHED",
) -> None:
    """Create a flow; ends are "IP PORT". Without `answered_by` it has no NAT."""
    (src, sport), (dst, port) = source.split(), destination.split()
    answers, answering = (answered_by or destination).split()
    command = ["conntrack", "-I", "-p", protocol, "-t", "600", "-s", src, "-d", dst, "--sport", sport]
    command += [
        "--dport",
        port,
        "-r",
        answers,
        "-q",
        src,
        "--reply-port-src",
        answering,
        "--reply-port-dst",
        sport,
    ]
    command += ["--state", state] if protocol in ("tcp", "sctp") else []
    command += ["--orig-vtag", "1", "--reply-vtag", "2"] if protocol == "sctp" else []
    command += ["-w", str(zone)] if zone else []
    outcome = runner.run(command)
    assert outcome.exit_code == 0, outcome.stderr


def listed(runner: Runner, family: Family) -> list[str]:
    """Return the entries, as the command `conntrack` prints them."""
    outcome = runner.run(("conntrack", "-L", "-f", family.value.lower()))
    assert outcome.exit_code == 0, outcome.stderr
    return outcome.stdout.splitlines()


def fill(family: Family, count: int) -> None:
    """Create many UDP flows to one resolver, in the calling thread's network namespace."""
    domain, base = (socket.AF_INET, b"") if family is Family.IPV4 else (socket.AF_INET6, b"\xfd" + bytes(11))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as connection:
        connection.settimeout(5)
        connection.bind((0, 0))
        for start in range(0, count, 200):
            numbers = range(start, min(start + 200, count))
            messages = [_new(domain, base, number, is_last=number == numbers[-1]) for number in numbers]
            connection.send(b"".join(messages))
            (error,) = struct.unpack_from("=i", connection.recv(65536), 16)
            assert error == 0, f"error {-error}; is nf_conntrack_max too low?"


def _new(domain: int, base: bytes, number: int, *, is_last: bool) -> bytes:
    client = base + struct.pack(">I", 0x0A000001 + number // 60000), 1024 + number % 60000
    resolver = base + ipaddress.ip_address("11.0.0.1").packed, 53
    attribute = netlink.attribute
    body = bytes((domain, 0, 0, 0)) + _tuple(1, client, resolver) + _tuple(2, resolver, client)
    body += attribute(3, struct.pack(">I", 1 << 3)) + attribute(7, struct.pack(">I", 600))
    flags = netlink.REQUEST | netlink.CREATE | netlink.EXCLUSIVE | (netlink.ACK if is_last else 0)
    return struct.pack("=IHHII", 16 + len(body), 1 << 8, flags, 1, 0) + body


def _tuple(kind: int, source: tuple[bytes, int], destination: tuple[bytes, int]) -> bytes:
    attribute = netlink.attribute
    first = 1 if len(source[0]) == 4 else 3
    addresses = attribute(first, source[0]) + attribute(first + 1, destination[0])
    ports = attribute(1, b"\x11") + attribute(2, struct.pack(">H", source[1]))
    ports += attribute(3, struct.pack(">H", destination[1]))
    return attribute(kind | NESTED, attribute(1 | NESTED, addresses) + attribute(2 | NESTED, ports))
