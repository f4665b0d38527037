"""Cluster IPs and node ports: who owns which, and the next free one."""

import ipaddress
from collections.abc import Callable, Sequence

from pykubeproxy.lab.apiserver.errors import ApiError

Claim = str | int  # an IP address in its canonical form, or a node port

NODE_PORTS = range(30000, 32768)


class Allocations:
    """The cluster IPs and node ports in use, each by one owner (an object's path).

    As on a real server, the low end of each range is left to explicit requests. Addresses outside the ranges may be
    claimed too.
    """

    def __init__(self, service_cidrs: Sequence[str]) -> None:
        networks = [ipaddress.ip_network(cidr) for cidr in service_cidrs]
        self._first = {f"IPv{net.version}": net.network_address + 1 for net in networks}
        self._addresses = {f"IPv{net.version}": _address_rotation(net) for net in networks}
        reserved = min(max(16, len(NODE_PORTS) // 32), 128)
        self._ports = _Rotation(len(NODE_PORTS), reserved, "nodePort: all are in use")
        self._owners: dict[Claim, str] = {}
        self._claims: dict[str, frozenset[Claim]] = {}

    @property
    def families(self) -> list[str]:
        """The families with a range of cluster IPs, the cluster's primary one first."""
        return list(self._first)

    def taken(self, claim: Claim, owner: str) -> bool:
        """Return whether another owner has it."""
        return self._owners.get(claim, owner) != owner

    def next_address(self, family: str) -> str:
        """Return a free cluster IP of a family (IPv4 or IPv6) without claiming it. Raise a 500 if none is left."""
        first = self._first[family]
        return str(first + self._addresses[family].next(lambda o: str(first + o) not in self._owners))

    def next_port(self, excluded: set[int]) -> int:
        """Return a free node port without claiming it. Raise a 500 if none is left."""

        def free(offset: int) -> bool:
            return NODE_PORTS[offset] not in excluded and NODE_PORTS[offset] not in self._owners

        return NODE_PORTS[self._ports.next(free)]

    def settle(self, owner: str, claims: frozenset[Claim]) -> None:
        """Make `claims` all that an owner has; free the rest."""
        for claim in self._claims.pop(owner, frozenset()) - claims:
            if self._owners.get(claim) == owner:
                del self._owners[claim]
        if claims:
            self._claims[owner] = claims
            self._owners.update(dict.fromkeys(claims, owner))


class _Rotation:
    """Goes round the offsets 0..size-1, so that a freed one is not reused at once."""

    def __init__(self, size: int, reserved: int, exhausted: str) -> None:
        self._size = size
        self._exhausted = exhausted
        self._low = min(reserved, size // 2)  # offsets below are used last
        self._next = self._low

    def next(self, free: Callable[[int], bool]) -> int:
        for candidates in (range(self._next, self._size), range(self._low, self._next), range(self._low)):
            for offset in candidates:
                if free(offset):
                    self._next = max(offset + 1, self._low)
                    return offset
        raise ApiError(500, f"Internal error occurred: failed to allocate a {self._exhausted}")


def _address_rotation(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> _Rotation:
    """Cover all addresses but the network's and, in IPv4, its broadcast address."""
    size = min(network.num_addresses - (2 if network.version == 4 else 1), 1 << 20)
    return _Rotation(size, min(max(16, size // 16), 256), f"serviceIP: IPv{network.version} range is full")
