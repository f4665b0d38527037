"""By which interface this network namespace reaches other addresses."""

from typing import NamedTuple

from pyroute2 import IPRoute

from pykubeproxy.kernel.domain import DOMAIN
from pykubeproxy.objects import Family

_EVERYTHING = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104 - not bound to
# linux/rtnetlink.h: RT_TABLE_MAIN
_MAIN = 254


class NetworkRoute(NamedTuple):
    """A network, "10.244.1.0/24", and the interface it is reached by; "" if it is not (blackhole and the like)."""

    network: str
    interface: str


def routes(family: Family) -> tuple[NetworkRoute, ...]:
    """The routes of the main table, of several ways the first; of the calling thread's network namespace."""
    with IPRoute() as route:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in route.get_links()}
        found = []
        for message in route.get_routes(family=DOMAIN[family], table=_MAIN):
            network = f"{message.get_attr('RTA_DST') or _EVERYTHING[family]}/{message['dst_len']}"
            ways = message.get_attr("RTA_MULTIPATH") or ()
            index = message.get_attr("RTA_OIF") or next((way["oif"] for way in ways), 0)
            found.append(NetworkRoute(network, names.get(index, "")))
    return tuple(found)
