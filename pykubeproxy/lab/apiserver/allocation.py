"""Cluster IPs and node ports: who has which, and the next free one."""

import ipaddress
from collections.abc import Callable, Sequence

Claim = str | int  # an IP address in its canonical form, or a node port

NODE_PORTS = range(30000, 32768)


class Allocations:
    """The cluster IPs and node ports in use, each by one owner (an object's path).

    As on a real server the low end of each range is left to those who ask for a certain address or port. Addresses
    outside the ranges may be claimed, too: a lab's objects come from anywhere.
    """

    def __init__(self, service_cidrs: Sequence[str]) -> None:
        networks = [ipaddress.ip_network(cidr) for cidr in service_cidrs]
        self._ranges = {f"IPv{network.version}": _AddressRange(network) for network in networks}
        self._ports = _Rotation(len(NODE_PORTS), reserved=min(max(16, len(NODE_PORTS) // 32), 128))
        self._owners: dict[Claim, str] = {}
        self._claims: dict[str, frozenset[Claim]] = {}

    @property
    def families(self) -> list[str]:
        """The families that have a range of cluster IPs, the cluster's own one first."""
        return list(self._ranges)

    def taken(self, claim: Claim, owner: str) -> bool:
        """Whether somebody other than `owner` has it."""
        return self._owners.get(claim, owner) != owner

    def next_address(self, family: str) -> str | None:
        """A free cluster IP of a family (IPv4 or IPv6), or None if all are taken. It is not claimed by this."""
        addresses = self._ranges[family]
        offset = addresses.rotation.next(lambda offset: addresses.at(offset) not in self._owners)
        return None if offset is None else addresses.at(offset)

    def next_port(self, besides: set[int]) -> int | None:
        """A free node port that is not among `besides`, or None. It is not claimed by this."""
        offset = self._ports.next(
            lambda o: NODE_PORTS[o] not in self._owners and NODE_PORTS[o] not in besides
        )
        return None if offset is None else NODE_PORTS[offset]

    def settle(self, owner: str, claims: frozenset[Claim]) -> None:
        """Make `claims` all that an owner has; what it had besides is free."""
        for claim in self._claims.pop(owner, frozenset()) - claims:
            if self._owners.get(claim) == owner:
                del self._owners[claim]
        if claims:
            self._claims[owner] = claims
            self._owners.update(dict.fromkeys(claims, owner))


class _Rotation:
    """Goes round the offsets 0..size-1, so that one given back is not given out again at once."""

    def __init__(self, size: int, reserved: int) -> None:
        self._size = size
        self._low = min(reserved, size // 2)  # what is below is used only when the rest is full
        self._next = self._low

    def next(self, free: Callable[[int], bool]) -> int | None:
        for candidates in (range(self._next, self._size), range(self._low, self._next), range(self._low)):
            for offset in candidates:
                if free(offset):
                    self._next = max(offset + 1, self._low)
                    return offset
        return None


class _AddressRange:
    """The addresses of a network that can be cluster IPs: not its first and, in IPv4, not its last."""

    def __init__(self, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> None:
        self._first = network.network_address + 1
        size = min(network.num_addresses - (2 if network.version == 4 else 1), 1 << 20)
        self.rotation = _Rotation(size, reserved=min(max(16, size // 16), 256))

    def at(self, offset: int) -> str:
        return str(self._first + offset)
