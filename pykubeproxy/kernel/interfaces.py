"""The network interfaces of this network namespace."""

import msgspec
from pyroute2 import IPRoute


class Interface(msgspec.Struct, frozen=True, order=True):
    """An interface: "eth0", and its kind as the kernel names it, "bridge", "veth"; "" for a real one and for lo."""

    name: str
    kind: str


def interfaces() -> tuple[Interface, ...]:
    """All of them, sorted by name; of the calling thread's network namespace."""
    with IPRoute() as route:
        found = []
        for link in route.get_links():
            about = link.get_attr("IFLA_LINKINFO")
            kind = about.get_attr("IFLA_INFO_KIND") if about else ""
            found.append(Interface(link.get_attr("IFLA_IFNAME"), kind or ""))
    return tuple(sorted(found))
