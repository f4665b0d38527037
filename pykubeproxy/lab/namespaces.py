"""Network namespaces, the cables between them and the processes inside them.

Every namespace of a lab is named `pkplab-LAB-ROLE`, so that what a lab made can be found by name alone.
Cables are made with each end in its own namespace: nothing ever shows up in the machine's own.
"""

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pyroute2 import IPRoute, netns

OWN = "/proc/thread-self/ns/net"
CLONE_NEWNET = 0x40000000
IFA_F_NODAD = 0x02
SCOPE_LINK = 253

_LIBC = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """One network namespace, made on construction.

    `role` is its place in the lab ("node1", "client", a pod's name), `name` is what `ip netns` calls it.
    """

    def __init__(self, lab: str, role: str) -> None:
        self.role = role
        self.name = f"{prefix(lab)}{role}"
        _create(self.name)
        with self.entered():
            self._route = IPRoute()
        self._set_up()

    def _set_up(self) -> None:
        # Without these the kernel holds an IPv6 address back for a second (duplicate address detection),
        # drops packets that come in where it would not send the answer out (reverse path filter),
        # and says "unreachable" to one sender only a few times a second.
        self.sysctl("net/ipv6/conf/default/accept_dad", "0")
        self.sysctl("net/ipv6/conf/default/accept_ra", "0")
        self.sysctl("net/ipv4/conf/all/rp_filter", "0")
        self.sysctl("net/ipv4/conf/default/rp_filter", "0")
        self.sysctl("net/ipv4/icmp_ratelimit", "0")
        self.sysctl("net/ipv6/icmp/ratelimit", "0")
        self._route.link("set", index=self.index("lo"), state="up")

    def forward(self) -> None:
        """Let packets pass through: this namespace is a router."""
        self.sysctl("net/ipv4/ip_forward", "1")
        self.sysctl("net/ipv4/conf/all/send_redirects", "0")
        self.sysctl("net/ipv4/conf/default/send_redirects", "0")
        self.sysctl("net/ipv6/conf/all/forwarding", "1")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread, and what it starts, is inside; other threads stay where they are."""
        with entered(self.name):
            yield

    def sysctl(self, name: str, value: str) -> None:
        """Write /proc/sys/NAME as it is seen inside."""
        with self.entered():
            Path("/proc/sys", name).write_text(value)

    def index(self, interface: str) -> int:
        """The kernel's number of an interface; raises LookupError if there is none."""
        for number in self._route.link_lookup(ifname=interface):
            return int(number)
        raise LookupError(f"no interface {interface} in {self.name}")

    def bridge(self, interface: str) -> None:
        """Make a bridge and switch it on."""
        self._route.link("add", ifname=interface, kind="bridge")
        self._route.link("set", index=self.index(interface), state="up")

    def cable(self, interface: str, other: "Namespace", other_interface: str) -> None:
        """A veth pair with one end here and the other there, both switched on."""
        end = os.open(f"/run/netns/{other.name}", os.O_RDONLY)
        try:
            peer = {"ifname": other_interface, "net_ns_fd": end}
            self._route.link("add", ifname=interface, kind="veth", peer=peer)
        finally:
            os.close(end)
        self._route.link("set", index=self.index(interface), state="up")
        other._route.link("set", index=other.index(other_interface), state="up")

    def plug(self, interface: str, bridge: str) -> None:
        """Make an interface a port of a bridge."""
        self._route.link("set", index=self.index(interface), master=self.index(bridge))

    def unplug(self, interface: str) -> None:
        """Remove an interface, and with it the other end of its cable."""
        self._route.link("del", index=self.index(interface))

    def address(self, interface: str, address: str, length: int, *, link_scope: bool = False) -> None:
        """Give an interface an address; one of link scope is never taken as a source towards elsewhere."""
        options: dict[str, int] = {"scope": SCOPE_LINK} if link_scope else {}
        if ":" in address:
            options["flags"] = IFA_F_NODAD
        self._route.addr("add", index=self.index(interface), address=address, prefixlen=length, **options)

    def route(self, destination: str, *, via: str = "", interface: str = "", kind: str = "unicast") -> None:
        """Add a route; with both `via` and `interface` the gateway need not be in a subnet of ours."""
        family = socket.AF_INET6 if ":" in f"{destination}{via}" else socket.AF_INET
        options: dict[str, object] = {"family": family, "type": kind}
        if via:
            options["gateway"] = via
        if interface:
            options["oif"] = self.index(interface)
        if via and interface:
            options["flags"] = ["onlink"]
        self._route.route("add", dst=destination, **options)

    def spawn(
        self,
        command: Sequence[str],
        *,
        output: IO[bytes] | int,
        errors: IO[bytes] | int = subprocess.STDOUT,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process inside, in a session of its own so that a Ctrl-C at the terminal passes it by."""
        with self.entered():
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    def remove(self) -> None:
        """Give up the name; the kernel takes the rest away with the last process inside."""
        self.close()
        netns.remove(self.name)

    def close(self) -> None:
        """Let go of the namespace, whoever removes it."""
        self._route.close()


def _create(name: str) -> None:
    """Make a namespace of that name.

    netns.create forks for it; such a child would hold every pipe of ours open, and the janitor waits for
    the end of one. So the calling thread steps into a new namespace, names it and steps back.
    """
    home = os.open(OWN, os.O_RDONLY)
    try:
        if _LIBC.unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot make a network namespace")
        try:
            netns.attach(name, f"{os.getpid()}/task/{threading.get_native_id()}")
        finally:
            netns.setns(home)
    finally:
        os.close(home)


@contextmanager
def entered(name: str) -> Iterator[None]:
    """The calling thread is inside the namespace of that name; raises OSError if there is none."""
    home = os.open(OWN, os.O_RDONLY)
    try:
        netns.setns(name, flags=0)
        try:
            yield
        finally:
            netns.setns(home)
    finally:
        os.close(home)


def prefix(lab: str) -> str:
    """What the names of all namespaces of a lab begin with."""
    return f"pkplab-{lab}-"


def names(lab: str) -> list[str]:
    """The namespaces of a lab that exist now, whoever made them."""
    return sorted(name for name in netns.listnetns() if name.startswith(prefix(lab)))
