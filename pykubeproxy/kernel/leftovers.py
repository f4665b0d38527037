"""Find and remove what kube-proxy leaves besides iptables rules: in ipvs mode, and in nftables mode.

Everything works on the network namespace of the calling thread. If one object cannot be removed, the others still are.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeVar

import msgspec

from pykubeproxy.kernel import addresses, ipset, ipvs, ipvs_mode, nftables
from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.ipvs_mode import VirtualServer
from pykubeproxy.objects import Family
from pykubeproxy.wording import listed

_NFTABLES_TABLE = "kube-proxy"
_NFTABLES_FAMILY = {Family.IPV4: "ip", Family.IPV6: "ip6"}
_T = TypeVar("_T")


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
        remover = ipvs.remover() if found.of_kube_proxy and not dry_run else contextlib.nullcontext()
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
    names = {ipvs_mode.INTERFACE: ipvs_mode.INTERFACE} if present else {}
    removed, failure = _remove(names, None if dry_run else addresses.remove_interface)
    return Leftovers("ipvs", "interface", removed, addresses=bound if removed else (), failure=failure)


def remove_ipsets(dry_run: bool = False) -> Leftovers:
    """Destroy the ipsets of ipvs mode. Call this after the removal of the iptables rules that refer to them."""
    try:
        present = _ipsets() & ipvs_mode.set_names()
    except OSError as error:
        return Leftovers("ipvs", "ipset", failure=f"cannot list ipsets: {_reason(error)}")
    removed, failure = _remove({name: name for name in sorted(present)}, None if dry_run else ipset.destroy)
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
    servers = ipvs.virtual_servers()
    if not servers:
        return VirtualServers((), ())
    bound = frozenset(_service_addresses())
    present = _ipsets()
    node_ports = {
        (*key, port)
        for key, name in ipvs_mode.node_port_sets().items()
        if name in present
        for port in ipset.ports(name)
    }
    of_kube_proxy = [server for server in servers if ipvs_mode.is_from_kube_proxy(server, bound, node_ports)]
    return VirtualServers(tuple(of_kube_proxy), tuple(it for it in servers if it not in of_kube_proxy))


def has_interface() -> bool:
    """Return whether kube-ipvs0 exists. Raises KernelError."""
    return any(interface.name == ipvs_mode.INTERFACE for interface in addresses.interfaces())


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
        return ipset.names()
    except PermissionError:
        raise
    except OSError:  # this kernel has no ipsets
        return frozenset()


def _service_addresses() -> tuple[str, ...]:
    """Return the addresses of kube-ipvs0. Raises KernelError."""
    return tuple(
        local.address
        for family in Family
        for local in addresses.local_addresses(family)
        if local.interface == ipvs_mode.INTERFACE
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
