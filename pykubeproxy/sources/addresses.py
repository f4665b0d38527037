"""The addresses at which a client reaches its API server."""

import ipaddress
import threading

# Keep only the newest ones: a load balancer may change its addresses again and again.
_MOST = 64

Address = tuple[str, int]


class ServerAddresses:
    """Collect the address and port of the server, or of the proxy in front of it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Address, None] = {}  # oldest first
        self._known: frozenset[Address] = frozenset()

    def add(self, host: str, port: int) -> None:
        """Add an IP address; ignore a name."""
        try:
            address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        except ValueError:
            return
        # Packets to a mapped address are IPv4.
        address = getattr(address, "ipv4_mapped", None) or address
        with self._lock:
            self._seen.pop((str(address), port), None)
            self._seen[str(address), port] = None
            while len(self._seen) > _MOST:
                del self._seen[next(iter(self._seen))]
            self._known = frozenset(self._seen)

    def known(self) -> frozenset[Address]:
        """Return all addresses so far."""
        return self._known
