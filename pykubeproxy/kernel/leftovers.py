"""Find and remove what kube-proxy leaves besides iptables rules: in ipvs mode, and in nftables mode.

In ipvs mode, these are ipsets, virtual servers of IPVS, and an interface with their addresses. Everything works on the
network namespace of the calling thread. If one object cannot be removed, the others still are.
"""

import contextlib
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from pykubeproxy.kernel import netlink, network, nftables
from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.objects import Family
from pykubeproxy.wording import listed

# linux/netfilter/ipset/ip_set.h
_DESTROY, _LIST = 6 << 8 | 3, 6 << 8 | 7
_PROTOCOL, _SET_NAME, _PORT, _FLAGS, _ENTRIES = 1, 2, 4, 6, 8
_ONLY_NAMES = (1 << 1).to_bytes(4, "big")
_VERSION = netlink.attribute(_PROTOCOL, b"\6")
INTERFACE = "kube-ipvs0"
_SET_NAME_LENGTH = 31  # of ipset, at most
_ADDRESS_SETS = (
    *("LOOP-BACK", "CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL", "LOAD-BALANCER", "LOAD-BALANCER-LOCAL"),
    *("LOAD-BALANCER-FW", "LOAD-BALANCER-SOURCE-IP", "LOAD-BALANCER-SOURCE-CIDR", "IPVS-IPS"),
    "HEALTH-CHECK-NODE-PORT",
)
_NODE_PORT_SETS = {"TCP": "NODE-PORT-TCP", "UDP": "NODE-PORT-UDP", "SCTP": "NODE-PORT-SCTP-HASH"}
_LOCAL_NODE_PORT_SETS = ("NODE-PORT-LOCAL-TCP", "NODE-PORT-LOCAL-UDP", "NODE-PORT-LOCAL-SCTP-HASH")
# "TCP  0A600001:01BB rr" or "UDP  [fd00:…:0001]:0035 rr". Servers by firewall mark have no address; kube-proxy has none.
_SERVER = re.compile(r"(TCP|UDP|SCTP) +(?:([0-9A-F]{8})|\[([0-9a-f:]+)\]):([0-9A-F]{4}) ")
_NFTABLES_TABLE = "kube-proxy"
_NFTABLES_FAMILY = {Family.IPV4: "ip", Family.IPV6: "ip6"}
_T = TypeVar("_T")


def ipset_names() -> frozenset[str]:
    """Return the names of all ipsets."""
    return frozenset(
        raw.get(_SET_NAME, b"").rstrip(b"\0").decode("ascii", "replace")
        for raw in map(
            netlink.attributes,
            netlink.netfilter_dump(_LIST, 0, _VERSION + netlink.attribute(_FLAGS, _ONLY_NAMES)),
        )
    )


def ipset_ports(name: str) -> frozenset[int]:
    """Return the ports in an ipset; none if there is no such ipset."""
    selector = _VERSION + netlink.string_attribute(_SET_NAME, name)
    found: set[int] = set()
    try:
        for raw in netlink.netfilter_dump(_LIST, 0, selector):
            entries = netlink.attributes(raw).get(_ENTRIES, b"")
            found |= {
                int.from_bytes(port, "big")
                for _, entry in netlink.elements(entries)
                if (port := netlink.attributes(entry).get(_PORT))
            }
    except FileNotFoundError:
        pass
    return frozenset(found)


def destroy_ipset(name: str) -> None:
    """Destroy an ipset. Raises OSError with EBUSY if a rule refers to it."""
    selector = _VERSION + netlink.string_attribute(_SET_NAME, name)
    try:
        netlink.netfilter_request(_DESTROY, netlink.ACK, 0, selector)
    except OSError as error:
        # The kernel has a code of its own for this, which is no error number.
        if error.errno == errno.EBADMSG:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY)) from None
        raise


class VirtualServer(NamedTuple):
    """A virtual server of IPVS: TCP, 10.96.0.1, 443."""

    protocol: str
    address: str
    port: int

    @property
    def family(self) -> Family:
        return Family.IPV6 if ":" in self.address else Family.IPV4

    def __str__(self) -> str:
        address = f"[{self.address}]" if self.family is Family.IPV6 else self.address
        return f"{self.protocol} {address}:{self.port}"


def set_names() -> frozenset[str]:
    """Return the names of all ipsets of ipvs mode.

    Other names with the same prefix belong to other programs, such as kube-router.
    """
    names = (*_ADDRESS_SETS, *_NODE_PORT_SETS.values(), *_LOCAL_NODE_PORT_SETS)
    return frozenset(_set_name(family, name) for family in Family for name in names)


def is_from_kube_proxy(
    server: VirtualServer,
    service_addresses: Collection[str],
    node_ports: Collection[tuple[Family, str, int]],
) -> bool:
    """Return whether kube-proxy created a virtual server, not another user of IPVS such as keepalived.

    `service_addresses` are those of kube-ipvs0. Node ports have virtual servers at the node's own addresses.
    """
    return server.address in service_addresses or (server.family, server.protocol, server.port) in node_ports


def _set_name(family: Family, name: str) -> str:
    return f"{'KUBE-6' if family is Family.IPV6 else 'KUBE'}-{name}"[:_SET_NAME_LENGTH]


def ipvs_servers(path: Path = Path("/proc/thread-self/net/ip_vs")) -> tuple[VirtualServer, ...]:
    """Return the virtual servers, sorted; none without IPVS. Unlike netlink, this loads no kernel module."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ()
    return tuple(sorted(_server(match) for line in lines if (match := _SERVER.match(line))))


@contextlib.contextmanager
def server_remover() -> Iterator[Callable[[VirtualServer], None]]:
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


class Leftovers(msgspec.Struct, frozen=True):
    """Objects of one kind from one mode: those removed, or to be removed in a dry run.

    - `addresses`: those of the interface
    - `kept`: objects of this kind that other programs created
    - `failure`: what could not be removed and why, or ""
    """

    mode: Literal["ipvs", "nftables"]
    kind: Literal["virtual server", "interface", "ipset", "table"]
    names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    failure: str = ""


class VirtualServers(NamedTuple):
    """The virtual servers of IPVS: those of kube-proxy, and those of other programs such as keepalived."""

    of_kube_proxy: tuple[VirtualServer, ...]
    others: tuple[VirtualServer, ...]


def remove_virtual_servers(dry_run: bool = False) -> Leftovers:
    """Remove the virtual servers of kube-proxy. Call this first: interface and ipsets tell which they are."""
    try:
        found = virtual_servers()
        remover = server_remover() if found.of_kube_proxy and not dry_run else contextlib.nullcontext()
        with remover as remove:
            removed, failure = _remove({str(server): server for server in found.of_kube_proxy}, remove)
    except (KernelError, OSError) as error:
        return Leftovers("ipvs", "virtual server", failure=f"cannot use IPVS: {_reason(error)}")
    return Leftovers("ipvs", "virtual server", removed, kept=tuple(map(str, found.others)), failure=failure)


def remove_interface(dry_run: bool = False) -> Leftovers:
    """Remove kube-ipvs0 with its addresses."""
    try:
        present = has_interface()
        bound = _service_addresses()
    except KernelError as error:
        return Leftovers("ipvs", "interface", failure=str(error))
    names = {INTERFACE: INTERFACE} if present else {}
    removed, failure = _remove(names, None if dry_run else network.remove_interface)
    return Leftovers("ipvs", "interface", removed, addresses=bound if removed else (), failure=failure)


def remove_ipsets(dry_run: bool = False) -> Leftovers:
    """Destroy the ipsets of ipvs mode. Call this after the removal of the iptables rules that refer to them."""
    try:
        present = _ipsets() & set_names()
    except OSError as error:
        return Leftovers("ipvs", "ipset", failure=f"cannot list ipsets: {_reason(error)}")
    removed, failure = _remove({name: name for name in sorted(present)}, None if dry_run else destroy_ipset)
    return Leftovers("ipvs", "ipset", removed, failure=failure)


def remove_nftables_tables(dry_run: bool = False) -> Leftovers:
    """Remove the tables of nftables mode."""
    try:
        families = {nftables_name(family): family for family in nftables_tables()}
    except OSError as error:
        return Leftovers("nftables", "table", failure=f"cannot list nftables tables: {_reason(error)}")
    removed, failure = _remove(families, None if dry_run else remove_nftables_table)
    return Leftovers("nftables", "table", removed, failure=failure)


def remove_nftables_table(family: Family) -> bool:
    """Remove the table of nftables mode. Return whether it existed. Raises OSError."""
    return nftables.remove_table(family, _NFTABLES_TABLE)


def virtual_servers() -> VirtualServers:
    """Return the virtual servers by their creator. Raises KernelError or OSError."""
    servers = ipvs_servers()
    if not servers:
        return VirtualServers((), ())
    bound = frozenset(_service_addresses())
    present = _ipsets()
    node_ports = {
        (family, protocol, port)
        for family in Family
        for protocol, name in _NODE_PORT_SETS.items()
        if (full_name := _set_name(family, name)) in present
        for port in ipset_ports(full_name)
    }
    of_kube_proxy = [server for server in servers if is_from_kube_proxy(server, bound, node_ports)]
    return VirtualServers(
        tuple(of_kube_proxy), tuple(server for server in servers if server not in of_kube_proxy)
    )


def has_interface() -> bool:
    """Return whether kube-ipvs0 exists. Raises KernelError."""
    return any(interface.name == INTERFACE for interface in network.interfaces())


def nftables_tables() -> tuple[Family, ...]:
    """Return the families with a table of nftables mode. Raises PermissionError."""
    try:
        return tuple(family for family in Family if nftables.has_table(family, _NFTABLES_TABLE))
    except PermissionError:
        raise
    except OSError:  # this kernel has no nftables
        return ()


def nftables_name(family: Family) -> str:
    """Return the name of a table of nftables mode, with its family."""
    return f"{_NFTABLES_FAMILY[family]} {_NFTABLES_TABLE}"


def _ipsets() -> frozenset[str]:
    """Return the names of all ipsets. Raises PermissionError."""
    try:
        return ipset_names()
    except PermissionError:
        raise
    except OSError:  # this kernel has no ipsets
        return frozenset()


def _service_addresses() -> tuple[str, ...]:
    """Return the addresses of kube-ipvs0. Raises KernelError."""
    return tuple(
        local.address
        for family in Family
        for local in network.local_addresses(family)
        if local.interface == INTERFACE
    )


def _remove(objects: Mapping[str, _T], remove: Callable[[_T], object] | None) -> tuple[tuple[str, ...], str]:
    """Remove objects by name; without a function, only pretend. Return the names removed, and why others were not."""
    removed: list[str] = []
    failed: dict[str, list[str]] = {}
    for name, item in objects.items():
        try:
            if remove:
                remove(item)
        except (FileNotFoundError, ProcessLookupError):  # another program removed it
            continue
        except (KernelError, OSError) as error:
            failed.setdefault(_reason(error), []).append(name)
        else:
            removed.append(name)
    failures = [f"cannot remove {listed(names, 4)}: {reason}" for reason, names in failed.items()]
    return tuple(removed), "; ".join(failures)


def _reason(error: KernelError | OSError) -> str:
    return str(error) if isinstance(error, KernelError) else error.strerror or str(error)
