"""What this process may do."""

from pathlib import Path

# linux/capability.h
_BITS = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_ADMIN": 21}


def capabilities(status: Path = Path("/proc/thread-self/status")) -> frozenset[str]:
    """Those of CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN that are in effect."""
    for line in status.read_text().splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
            return frozenset(name for name, bit in _BITS.items() if mask & 1 << bit)
    return frozenset()
