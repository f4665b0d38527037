"""The only room that touches Linux: iptables, nfacct counters, kernel settings, local addresses.

A thin interface over the command-line tools and netlink; it decides nothing about rules.
"""

from pykubeproxy.kernel.addresses import AddressWatch, LocalAddress, local_addresses
from pykubeproxy.kernel.backend import choose
from pykubeproxy.kernel.errors import (
    Failed,
    KernelError,
    Lacking,
    LockHeld,
    Missing,
    NotPermitted,
    Refused,
    TimedOut,
)
from pykubeproxy.kernel.features import Features, probe, unavailable
from pykubeproxy.kernel.iptables import Iptables, Tables, open_iptables
from pykubeproxy.kernel.live import live, part_about
from pykubeproxy.kernel.runner import Outcome, Runner
from pykubeproxy.kernel.tools import Backend

__all__ = [
    "AddressWatch",
    "Backend",
    "Failed",
    "Features",
    "Iptables",
    "KernelError",
    "Lacking",
    "LocalAddress",
    "LockHeld",
    "Missing",
    "NotPermitted",
    "Outcome",
    "Refused",
    "Runner",
    "Tables",
    "TimedOut",
    "choose",
    "live",
    "local_addresses",
    "open_iptables",
    "part_about",
    "probe",
    "unavailable",
]
