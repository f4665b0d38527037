"""Read and remove virtual servers of IPVS, the kernel's other load balancer.

Everything works on the network namespace of the calling thread.
"""

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from pykubeproxy.kernel.ipvs_mode import VirtualServer

# "TCP  0A600001:01BB rr" or "UDP  [fd00:…:0001]:0035 rr". Servers by firewall mark have no address; kube-proxy has none.
_SERVER = re.compile(r"(TCP|UDP|SCTP) +(?:([0-9A-F]{8})|\[([0-9a-f:]+)\]):([0-9A-F]{4}) ")


def virtual_servers(path: Path = Path("/proc/thread-self/net/ip_vs")) -> tuple[VirtualServer, ...]:
    """Return the virtual servers, sorted; none without IPVS. Unlike netlink, this loads no kernel module."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ()
    return tuple(sorted(_server(match) for line in lines if (match := _SERVER.match(line))))


@contextlib.contextmanager
def remover() -> Iterator[Callable[[VirtualServer], None]]:
    """Yield a function that removes a virtual server with its real servers. Both raise OSError."""
    from pyroute2 import IPVS, IPVSService
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPVS() as ipvs:

            def remove(server: VirtualServer) -> None:
                protocol = getattr(socket, f"IPPROTO_{server.protocol}")
                service = IPVSService(addr=server.address, port=server.port, protocol=protocol)
                try:
                    ipvs.service("del", service=service)
                except NetlinkError as error:
                    raise _os_error(error.code) from None

            yield remove
    except NetlinkError as error:
        raise _os_error(error.code) from None


def _os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _server(match: re.Match[str]) -> VirtualServer:
    protocol, ipv4, ipv6, port = match.groups()
    address = ipaddress.ip_address(int(ipv4, 16) if ipv4 else ipv6)
    return VirtualServer(protocol, str(address), int(port, 16))
